"""Training scripts that show how a user attaches the monitor: small enough to read, real enough to run."""
