"""What is decided and worded for jobs of either kind: plain data in, data or text out."""
