"""One rank at work: the threads behind the training API, and what they own.

Reading order: session (the main thread's door), comm_thread, then state/ (the tensors), checkpoint/
and metrics/. What the protocol wants is decided in `core.rank`.
"""
