"""The claims, one module each; its `CLAIM` says what a paper found and how to see it here."""
