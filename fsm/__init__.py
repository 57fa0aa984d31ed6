"""The round as a table: states, facts and the machine that runs them, without any I/O."""
