"""StableRL: why a reinforcement-learning run of a language model breaks, and in which layer."""

__version__ = "0.1.0"
