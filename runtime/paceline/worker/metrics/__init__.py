"""What a rank tells of itself: figures in shared memory for its agent, facts in its heartbeat."""
