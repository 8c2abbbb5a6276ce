"""What servers compute for row tables: stores of rows by id, their rules, their coming and going."""
