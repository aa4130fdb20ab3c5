"""Data channels, which sum gradients over the ranks of a job: MPI, gloo, NCCL and shared memory."""
