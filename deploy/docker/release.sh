#!/bin/sh
# Builds the images of a release, and pushes them: sh deploy/docker/release.sh REGISTRY VERSION PYTHON_TAG true|false
#
# The base images are taken by the digests that their registry answers. With `true` the images are pushed, each with a bill of
# materials and where it was built, and dist/images.json gets the digests that the registry has given them.
set -eu
registry=$1 version=$2 python=$3 is_pushed=$4
mkdir -p dist
base=$(docker buildx imagetools inspect "docker.io/library/python:$python" --format '{{.Manifest.Digest}}')
vllm=$(sed -n 's/^ARG VLLM=//p' deploy/docker/worker-vllm.Dockerfile)
vllm_base=$(docker buildx imagetools inspect "docker.io/vllm/vllm-openai:$vllm" --format '{{.Manifest.Digest}}')

build() { # NAME TAG DOCKERFILE LOCK OPTION...
  name=$1 tag=$2 file=$3 lock=deploy/docker/locks/$4.txt
  shift 4
  # A package with binaries has a file for each processor. A lock without that of torch for aarch64 makes no image for it.
  platforms=linux/amd64,linux/arm64
  if [ "$(sed -n '/^torch==/,/[^\\]$/p' "$lock" | grep -c sha256)" = 1 ]; then
    platforms=linux/amd64
  fi
  if [ "$is_pushed" = true ]; then
    set -- --push --sbom=true --provenance=mode=max "$@"
  fi
  case $file in
    worker-vllm) set -- --build-arg "VLLM=$vllm@$vllm_base" "$@" ;;
    *) set -- --build-arg "PYTHON=$python@$base" "$@" ;;
  esac
  docker buildx build --platform "$platforms" --file "deploy/docker/$file.Dockerfile" \
    --build-arg "VERSION=$version" --tag "${registry:-local}/$name:$tag" \
    --metadata-file "dist/$name-$tag.json" "$@" .
}

digest() { # NAME TAG
  sed -n 's/.*"containerimage.digest": *"\(sha256:[0-9a-f]*\)".*/\1/p' "dist/$1-$2.json" | head -n 1
}

# Without a builder of its own docker keeps neither bills of materials nor provenance.
docker buildx create --use --name baton-release --driver docker-container > /dev/null 2>&1 || docker buildx use baton-release
build baton-router "$version" router router
build baton-worker "$version" worker torch-cpu
build baton-worker "$version-cuda" worker torch-cu130 --build-arg VARIANT=cuda
build baton-worker "$version-vllm" worker-vllm torch-cu130
if [ "$is_pushed" = true ]; then
  cat > dist/images.json << END
{
  "router": {"repository": "$registry/baton-router", "digest": "$(digest baton-router "$version")"},
  "worker": {"repository": "$registry/baton-worker", "digest": "$(digest baton-worker "$version")"},
  "worker-cuda": {"repository": "$registry/baton-worker", "digest": "$(digest baton-worker "$version-cuda")"},
  "worker-vllm": {"repository": "$registry/baton-worker", "digest": "$(digest baton-worker "$version-vllm")"}
}
END
fi
rm -f dist/baton-*.json
