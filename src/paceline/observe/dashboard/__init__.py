"""A page that shows runs in a browser, while they go on and afterwards."""
