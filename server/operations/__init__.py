"""What operators read: metrics and the statistics log."""
