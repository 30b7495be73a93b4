"""What the backends share, and the backends."""
