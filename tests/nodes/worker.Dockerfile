# The image of the tests' jobs: the operator's, which holds the coordinator too, for pods that get
# the test run's own Python mounted, with torch. A build of the worker takes minutes and gigabytes.
ARG OPERATOR
FROM ${OPERATOR}
USER root
# A Python below root's home is to be found by others.
RUN chmod 755 /root
USER 65532:65532
