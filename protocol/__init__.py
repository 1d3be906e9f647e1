"""What the target daemon, the draft daemon and the supervisor agree on."""

__version__ = "0.1.0"
