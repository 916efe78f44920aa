"""The folders of a pod: what its containers see as mounts.

    FOLDER/            short: sockets lie below it, and their paths are limited to 107 bytes
      v0, v1, ...      a pod's own volumes, shared by its containers
      c0, c1, ...      one container's: 0, 1, ... are its copies of ConfigMaps and Secrets, in its own translation
        t, home        what TMPDIR and HOME say

A ConfigMap or a Secret is read when its container starts, and not again while it runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.fakekube.machine.environment import Lookup, NotYet, contents, field, resource
from tests.fakekube.machine.objects import CONFIG_MAP, SECRET
from tests.fakekube.machine.translate import Translation
from tests.fakekube.store import Missing, Object, Resource

FROM_OBJECTS = ("configMap", "secret", "downwardAPI", "projected")


@dataclass(frozen=True, slots=True)
class ContainerFolders:
    home: Path
    tmp: Path
    mounts: dict[str, str]
    """mountPath -> where it is."""


class PodFolder:
    def __init__(self, path: Path, lookup: Lookup, claim_folder: Callable[[str], Path]) -> None:
        """
        Args:
            claim_folder: of a PersistentVolumeClaim of the pod's namespace, by name.
        """
        self.path = path
        self._lookup = lookup
        self._claim_folder = claim_folder
        path.mkdir()

    def of(self, pod: Object, container: Object) -> ContainerFolders:
        """Makes a container's folders, those of ConfigMaps and Secrets still empty."""
        own = self._own(pod, container)
        own.mkdir(exist_ok=True)
        mounts = {mount["mountPath"].rstrip("/"): self._mounted(own, pod, mount) for mount in _mounts(container)}
        tmp = Path(mounts.get("/tmp", own / "t"))
        for path in (tmp, own / "home"):
            path.mkdir(exist_ok=True)
        _link_nested({"/tmp": str(tmp)} | mounts)
        return ContainerFolders(own / "home", tmp, mounts)

    def fill(self, pod: Object, container: Object, translation: Translation) -> None:
        """Writes the files of ConfigMaps, Secrets and the downward API.

        Another container may read a copy of them, so they name the shared volumes, also those that this container does
        not mount.

        Raises:
            NotYet: an object is missing.
            UnknownService: of a file's text.
        """
        mounted = {mount["name"] for mount in _mounts(container)}
        translation = replace(translation, mounts=self._shared(pod) | dict(translation.mounts))
        for n, volume in enumerate(pod["spec"].get("volumes") or []):
            if volume["name"] in mounted and _is_from_objects(volume):
                place = self._place(self._own(pod, container), n, volume)
                for name, value in self._files(volume, pod).items():
                    file = place / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.unlink(missing_ok=True)  # of the container's life before; it may have been read-only
                    file.write_bytes(_translated(value, translation))
                    file.chmod(_mode(volume))

    def remove(self) -> None:
        """May come twice."""
        if self.path.exists():
            shutil.rmtree(self.path)

    def _shared(self, pod: Object) -> dict[str, str]:
        """mountPath -> where it is, of all volumes that are not one container's."""
        shared = {volume["name"] for volume in pod["spec"].get("volumes") or [] if not _is_from_objects(volume)}
        containers = [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]
        mounts = [mount for container in containers for mount in _mounts(container) if mount["name"] in shared]
        return {mount["mountPath"].rstrip("/"): self._mounted(self.path, pod, mount) for mount in mounts}

    def _mounted(self, own: Path, pod: Object, mount: Object) -> str:
        """Where a mount leads. Makes it."""
        volumes = enumerate(pod["spec"].get("volumes") or [])
        number, volume = next((n, volume) for n, volume in volumes if volume["name"] == mount["name"])
        place = self._place(own, number, volume)
        if below := mount.get("subPath"):
            place /= below
            if not _is_from_objects(volume):
                place.mkdir(parents=True, exist_ok=True)
        return str(place)

    def _own(self, pod: Object, container: Object) -> Path:
        names = [c["name"] for c in [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]]
        return self.path / f"c{names.index(container['name'])}"

    def _place(self, own: Path, number: int, volume: Object) -> Path:
        """Where a volume is. Makes it."""
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            return self._claim_folder(volume["persistentVolumeClaim"]["claimName"])
        if "emptyDir" not in volume and not _is_from_objects(volume):
            raise NotYet("CreateContainerConfigError", f"this kubelet does not know volume {volume}")
        place = own / str(number) if _is_from_objects(volume) else self.path / f"v{number}"
        place.mkdir(exist_ok=True)
        return place

    def _files(self, volume: Object, pod: Object) -> dict[str, bytes]:
        """By path in the volume."""
        if "projected" in volume:
            found: dict[str, bytes] = {}
            for source in volume["projected"].get("sources") or []:
                found |= self._files(source, pod)
            return found
        if "downwardAPI" in volume:
            return {item["path"]: _downward(item, pod) for item in volume["downwardAPI"].get("items") or []}
        if "configMap" in volume:
            return self._files_of(CONFIG_MAP, volume["configMap"], volume["configMap"].get("name", ""))
        if "secret" in volume:
            secret = volume["secret"]
            return self._files_of(SECRET, secret, secret.get("secretName") or secret.get("name", ""))
        raise NotYet("CreateContainerConfigError", f"this kubelet does not project {volume}")

    def _files_of(self, kind: Resource, source: Object, name: str) -> dict[str, bytes]:
        try:
            found = contents(kind, self._lookup(kind, name))
            if items := source.get("items"):
                return {item["path"]: found[item["key"]] for item in items}
        except (Missing, KeyError) as error:
            if source.get("optional"):
                return {}
            raise NotYet("ContainerCreating", f"MountVolume.SetUp failed: {error}") from None
        return found


def _mounts(container: Object) -> list[Object]:
    return container.get("volumeMounts") or []


def _is_from_objects(volume: Object) -> bool:
    return any(kind in volume for kind in FROM_OBJECTS)


def _mode(volume: Object) -> int:
    """The permissions of its files."""
    return next(int(volume[kind].get("defaultMode", 0o644)) for kind in FROM_OBJECTS if kind in volume)


def _translated(value: bytes, translation: Translation) -> bytes:
    try:
        return translation.text(value.decode()).encode()
    except UnicodeDecodeError:
        return value


def _downward(item: Object, pod: Object) -> bytes:
    if "fieldRef" in item:
        return field(pod, item["fieldRef"]["fieldPath"]).encode()
    reference = item["resourceFieldRef"]
    container = next(c for c in pod["spec"]["containers"] if c["name"] == reference["containerName"])
    return resource(container, reference).encode()


def _link_nested(mounts: dict[str, str]) -> None:
    """A mount below another is seen through it: who has joined a path from TMPDIR finds the volume at it."""
    for path, place in mounts.items():
        around = [other for other in mounts if path.startswith(f"{other}/")]
        if around:
            outer = max(around, key=len)
            link = Path(mounts[outer]) / path.removeprefix(f"{outer}/")
            if not link.exists() and not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(place)
