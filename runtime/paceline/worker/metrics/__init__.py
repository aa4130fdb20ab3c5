"""What a rank reports about itself: metrics in shared memory for its agent, and heartbeat facts."""
