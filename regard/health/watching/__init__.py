"""What a `Monitor` needs while a model trains: trends, log writers, trainer callbacks."""
