"""What production does to a server, done to this one: each file does one thing many times and counts what is lost."""
