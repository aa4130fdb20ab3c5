# Images of Paceline.
#
#   docker build --target operator -t paceline/operator:0.2.0 .
#   docker build --target worker -t paceline/worker:0.2.0 .                     CUDA, as uv.lock has it
#   docker build --target worker --build-arg TORCH=cpu --build-arg TORCH_SHA256=DIGEST ...
#
# A job's own image is made from the worker, as examples/digits/Dockerfile shows.
#
# Any Debian with Python 3.11 to 3.14 and its venv will do as BASE, which is named by its digest so
# that everybody builds on the same one; docs/release.md says how to take a newer one. Packages come
# from the index that pip is set to use; versions and hashes come from uv.lock and scripts/uv.txt.
ARG BASE=python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

# ---- what builds, and is in no image ----------------------------------------------------------
FROM ${BASE} AS tools
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY scripts/uv.txt scripts/build.txt /tools/
RUN python3 -m venv /tools && /tools/bin/pip install --quiet --require-hashes \
        --requirement /tools/uv.txt --requirement /tools/build.txt
# Without pip, which only the worker's image keeps, for those that build on it.
RUN python3 -m venv --without-pip /opt/paceline
WORKDIR /source
COPY pyproject.toml uv.lock ./

FROM tools AS wheel
COPY README.md LICENSE ./
COPY crds crds
COPY runtime runtime
COPY operator operator
RUN /tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheel .

# ---- operator: no torch, no MPI ---------------------------------------------------------------
FROM tools AS operator-packages
RUN /tools/bin/uv export --quiet --frozen --no-dev --no-emit-project --extra operator \
        --output-file /tools/operator.txt \
    && /tools/bin/pip --python /opt/paceline/bin/python3 install --quiet --no-deps \
        --require-hashes --requirement /tools/operator.txt
COPY --from=wheel /wheel /wheel
RUN /tools/bin/pip --python /opt/paceline/bin/python3 install --quiet --no-deps --no-index /wheel/*.whl

FROM ${BASE} AS operator
LABEL org.opencontainers.image.title="Paceline operator" org.opencontainers.image.licenses=Apache-2.0
# USER: libraries ask for a name, and the number below, or another that a cluster gives, has none.
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 USER=paceline HOME=/tmp
COPY --from=operator-packages /opt/paceline /opt/paceline
# A number, so that Kubernetes can see that it is not root.
USER 65532:65532
ENTRYPOINT ["python3", "-m", "paceline_operator"]

# ---- worker: torch, MPICH, the runtime; also the coordinator of a job -------------------------
FROM tools AS worker-packages
RUN apt-get update --quiet \
    && apt-get install --yes --quiet --no-install-recommends gcc libc6-dev
RUN python3 -m venv /opt/paceline
# cuda: the build that uv.lock lists. cpu: the same version from TORCH_INDEX, a tenth of the size, if
# its wheel has the digest TORCH_SHA256.
ARG TORCH=cuda
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_SHA256=
COPY scripts/torch-cpu scripts/torch-cpu
RUN set -eu; \
    pip() { /tools/bin/pip --python /opt/paceline/bin/python3 install --quiet --no-deps --require-hashes "$@"; }; \
    case $TORCH in \
        cuda) /tools/bin/uv export --quiet --frozen --no-dev --no-emit-project --extra runtime \
                --output-file /tools/all.txt; \
            pip --requirement /tools/all.txt ;; \
        cpu) scripts/torch-cpu /tools/bin/uv --no-dev --extra runtime > /tools/all.txt; \
            pip --extra-index-url "$TORCH_INDEX" --requirement /tools/all.txt ;; \
        *) echo "TORCH is $TORCH: use cuda or cpu" >&2; exit 2 ;; \
    esac
COPY --from=wheel /wheel /wheel
RUN /tools/bin/pip --python /opt/paceline/bin/python3 install --quiet --no-deps --no-index /wheel/*.whl
# The image has no compiler: what a rank would compile when it first reduces is built here.
RUN /opt/paceline/bin/python3 -m paceline.transport.native

FROM ${BASE} AS worker
LABEL org.opencontainers.image.title="Paceline worker" org.opencontainers.image.licenses=Apache-2.0
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 USER=paceline HOME=/tmp
COPY --from=worker-packages /opt/paceline /opt/paceline
# Where a job's script lies: the folder in which its command runs, open to whatever user it runs as.
RUN mkdir --mode=1777 /workspace
WORKDIR /workspace
USER 65532:65532
ENTRYPOINT ["python3", "-m", "paceline.agent"]
