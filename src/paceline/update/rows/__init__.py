"""What servers compute for row tables: stores of rows by id, rules, lifecycle."""
