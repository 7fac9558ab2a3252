"""The output of ranks: from their pipes to the streams of the launcher, and to log files."""
