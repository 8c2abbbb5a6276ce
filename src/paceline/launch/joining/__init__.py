"""Workers that `paceline join` starts, from another terminal or machine, in the places of a run."""
