"""`paceline advise`: which consistency, servers and placement would make a recorded run faster."""
