# A kvferry node. Build context: the root of the repository.
FROM python:3.11-slim
COPY locks/core.txt /src/locks/core.txt
RUN pip install --no-cache-dir --require-hashes -r /src/locks/core.txt
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir --no-deps /src
# A volume mounted here takes owner and mode from the image: engines enter by the group.
RUN groupadd --gid 10001 kvferry && useradd --uid 10001 --gid 10001 --no-create-home kvferry \
    && install -d --owner=kvferry --group=kvferry --mode=0750 /run/kvferry
USER 10001:10001
ENTRYPOINT ["kvferry", "node"]
