#!/bin/sh
# A Kubernetes cluster in a container of this machine, with Baton in it: sh deploy/kind/up.sh
#
#   needs docker, kind, kubectl and helm; 8 GB of memory
#   BATON_ROUTER_IMAGE and BATON_WORKER_IMAGE, as in a release's release.env, name images; without them they are built here
#   kind delete cluster --name baton    ends it
set -eu
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^appVersion: *//p' helm/baton/Chart.yaml)
router=${BATON_ROUTER_IMAGE:-baton-router:$version}
worker=${BATON_WORKER_IMAGE:-baton-worker:$version}

if [ -z "${BATON_ROUTER_IMAGE:-}${BATON_WORKER_IMAGE:-}" ]; then
  docker build --file deploy/docker/router.Dockerfile --tag "$router" .
  docker build --file deploy/docker/worker.Dockerfile --tag "$worker" .
else
  docker pull "$router"
  docker pull "$worker"
fi
kind get clusters | grep -qx baton || kind create cluster --name baton --wait 120s
# kind loads images by a tag; what was given by its digest gets one here.
docker tag "$router" "baton-router:$version"
docker tag "$worker" "baton-worker:$version"
kind load docker-image --name baton "baton-router:$version" "baton-worker:$version"
helm upgrade --install baton helm/baton --kube-context kind-baton --namespace serving --create-namespace \
  --values helm/baton/values-cpu.yaml --set router.replicas=1 --wait --timeout 15m
echo "Serving. In another terminal:"
echo "  kubectl --context kind-baton -n serving port-forward service/baton 50051:50051 8000:8000"
echo "  baton chat"
