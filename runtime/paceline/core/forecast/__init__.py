"""What a job would do at another size, in another mode: from what runs of it have measured."""
