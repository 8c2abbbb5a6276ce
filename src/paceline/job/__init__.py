"""What all processes of a job agree on: spec, strategy, environment, addresses."""
