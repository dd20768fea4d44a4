"""The file server on the box: reads requests from stdin, answers on stdout, in order. Stdlib only, Python 3.8+.

A frame is the lengths of two parts, a JSON object, and bytes. It is started over an SSH channel, which also brings its
source, and ends with it: nothing is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import sys
import time
import zlib

from sojourn.remote.box.channels import accept
from sojourn.remote.box.hashes import DOWNLOAD, UPLOAD, HashCache, new_hash
from sojourn.remote.box.transfer import ArrivingHash, FollowingHash, Partial, Paths, Refused, write_whole
from sojourn.remote.box.tree import describe, make_links_and_folders, scan

TYPE_CHECKING = False  # an agent starts for each stream: what it rarely needs is imported where it is
if TYPE_CHECKING:
    import socket
    from typing import Any, BinaryIO, Callable

HEAD = struct.Struct("!II")
_OPEN_PARTIALS = 16
MOST_BYTES = 1 << 28  # of one part of a frame


def read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError
    return data


class Agent:
    def __init__(self) -> None:
        self._caches: dict[str, HashCache] = {}
        self._partials: dict[str, Partial] = {}
        self._hashes: dict[str, FollowingHash] = {}
        self._arriving: dict[str, ArrivingHash] = {}

    def answer(self, request: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        operation: Callable[..., Any] | None = getattr(self, "do_" + str(request.pop("do", "")), None)
        try:
            if operation is None:
                raise Refused("the agent has no such operation")
            if request.pop("packed", False):
                blob = zlib.decompress(blob)
            result = operation(blob, **request)
            fields, data = result if isinstance(result, tuple) else (result, b"")
            return dict(fields or {}, ok=True), data
        except Refused as error:
            return {"error": str(error), "kind": "refused"}, b""
        except OSError as error:
            return {"error": str(error), "kind": "os", "errno": error.errno or 0}, b""
        except Exception as error:  # whatever it is, the other requests still get their answers
            return {"error": "%s: %s" % (type(error).__name__, error), "kind": "bug"}, b""

    # single files

    def do_read(self, blob: bytes, path: str, most: int) -> Any:
        try:
            with open(os.path.expanduser(path), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Refused("%s is not a file" % path)
                return {"found": True}, file.read(most)
        except (FileNotFoundError, NotADirectoryError):
            return {"found": False}

    def do_write(self, blob: bytes, path: str, mode: int) -> None:
        path = os.path.expanduser(path)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_whole(os.path.realpath(path), blob, mode, sync=True)

    def do_remove(self, blob: bytes, path: str) -> None:
        import shutil

        path = os.path.expanduser(path)
        if os.path.realpath(path) in ("/", os.path.realpath(os.path.expanduser("~"))):
            raise Refused("%s is not removed" % path)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)

    def do_rename(self, blob: bytes, old: str, new: str) -> None:
        """Repeating it is harmless: where only the new one is there, it has happened."""
        if os.path.lexists(old) or not os.path.lexists(new):
            os.replace(old, new)

    def do_mkdir(self, blob: bytes, path: str, mode: int) -> None:
        os.makedirs(os.path.expanduser(path), mode=mode, exist_ok=True)

    def do_list(self, blob: bytes, pattern: str, content: bool, most: int) -> Any:
        """`content`: the files' bytes too, each cut after `most`."""
        import glob

        found, parts = [], []
        for path in sorted(glob.glob(os.path.expanduser(pattern), recursive=True)):
            try:
                status = os.stat(path)
                data = b""
                if content and stat.S_ISREG(status.st_mode):
                    with open(path, "rb") as file:
                        data = file.read(most)
            except OSError:
                continue  # removed meanwhile
            kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
            found.append([path, kind, status.st_size, status.st_mtime, len(data)])
            parts.append(data)
        return {"found": found}, b"".join(parts)

    def do_disk(self, blob: bytes, path: str) -> Any:
        import shutil

        path = os.path.expanduser(path)
        while not os.path.exists(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        usage = shutil.disk_usage(path)
        return {"free": usage.free, "total": usage.total}

    def do_tail(self, blob: bytes, path: str, offset: int, wait: float, most: int) -> Any:
        """Waits until there is something after `offset`."""
        until = time.monotonic() + wait
        while True:
            try:
                with open(os.path.expanduser(path), "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    if size > offset or time.monotonic() >= until:
                        file.seek(offset)
                        return {"size": size, "found": True}, file.read(most)
            except (FileNotFoundError, NotADirectoryError):
                if time.monotonic() >= until:
                    return {"size": 0, "found": False}
            time.sleep(min(0.1, max(0.0, until - time.monotonic())))

    # trees

    def _cache(self, name: str, algorithm: str, fresh: bool = False) -> HashCache:
        """`fresh`: with what other agents have written into it."""
        if fresh or name not in self._caches:
            self._caches[name] = HashCache(os.path.expanduser(name), algorithm)
        return self._caches[name]

    def _root(self, root: str) -> Paths:
        """Anew for each request, since folders may be removed between them."""
        return Paths(os.path.expanduser(root))

    def do_compare(self, blob: bytes, root: str, cache: str) -> Any:
        """`blob`: the other end's manifest, with null for what it does not ask about. Which of its files are missing or
        different here, by number; and for those whose hash it does not know, the hash of the file of the same size
        here."""
        known, paths = self._cache(cache, UPLOAD, fresh=True), self._root(root)
        need, hashes = [], {}
        for index, line in enumerate(json.loads(zlib.decompress(blob))):
            if line is None:
                continue
            rel, _, size, digest, mode = line
            try:
                path = paths.of(rel)
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError, Refused):  # what is refused is said when it is put
                need.append(index)
                continue
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                need.append(index)
            elif digest is None:
                hashes[str(index)] = known.of(path, status)
            elif known.of(path, status) != digest:
                need.append(index)
            elif stat.S_IMODE(status.st_mode) != mode:
                os.chmod(path, mode)
        known.save()
        return {"need": need, "hashes": hashes}

    def do_manifest(self, blob: bytes, root: str, cache: str, small: int) -> Any:
        """`blob`: sizes of the files that the other end has, by path; only the same size is worth a hash here."""
        root, known = os.path.expanduser(root), self._cache(cache, DOWNLOAD, fresh=True)
        theirs = json.loads(zlib.decompress(blob)) if blob else {}
        entries: list[list[Any]] = []
        skipped: list[str] = []
        for entry in scan(root, skipped.append):
            digest = None
            if entry.kind == "file" and entry.size > small:
                digest = known.cached(entry.path, entry.status)
            if entry.kind == "file" and digest is None and theirs.get(entry.rel) == entry.size:
                digest = known.of(entry.path, entry.status)
            entries.append(describe(entry, digest))
        known.save()
        exists = os.path.lexists(root)
        is_file = os.path.isfile(root)
        return {"exists": exists, "is_file": is_file, "skipped": skipped}, zlib.compress(
            json.dumps(entries).encode(), 1
        )

    def do_put_many(self, blob: bytes, root: str, cache: str, files: list[Any], sync: bool) -> Any:
        paths, known, at, view, failed = self._root(root), self._cache(cache, UPLOAD), 0, memoryview(blob), []
        for index, (rel, size, mode, mtime_ns, digest) in enumerate(files):
            data = view[at : at + size]
            at += size
            try:
                if new_hash(UPLOAD, data).hexdigest() != digest:
                    raise Refused("%s: the bytes that arrived are not those that were sent" % rel)
                path = paths.of(rel, make=True)
                known.remember(path, write_whole(path, data, mode, mtime_ns, sync), digest)
            except (OSError, Refused) as error:
                failed.append([index, str(error), getattr(error, "errno", 0) or 0])
        known.save()
        return {"failed": failed}

    def do_folders(self, blob: bytes, root: str, entries: list[Any]) -> Any:
        os.makedirs(os.path.expanduser(root), exist_ok=True)
        return {"failed": make_links_and_folders(self._root(root), entries)}

    def do_begin(self, blob: bytes, root: str, rel: str, key: str, size: int) -> Any:
        import shutil

        path = self._root(root).of(rel, make=True)
        partial = self._partials[key] = Partial(path, key, size)
        ranges = partial.begin()
        missing = size - sum(end - start for start, end in ranges)
        free = shutil.disk_usage(os.path.dirname(path)).free
        if free < missing:
            raise OSError(28, "the disk of the box has %d MiB free, %s needs %d" % (free >> 20, rel, missing >> 20))
        return {"ranges": ranges}

    def do_put(
        self, blob: bytes, root: str, rel: str, key: str, size: int, offset: int, crc: int, in_order: bool
    ) -> None:
        if zlib.crc32(blob) != crc:
            raise Refused("%s: the bytes that arrived are not those that were sent" % rel)
        if key not in self._partials:
            while len(self._partials) >= _OPEN_PARTIALS:
                self._partials.pop(next(iter(self._partials))).close()
            self._partials[key] = Partial(self._root(root).of(rel, make=True), key, size)
        self._partials[key].write(offset, blob)
        if in_order and offset == 0:
            self._arriving[key] = ArrivingHash()
        if in_order and not self._arriving[key].add(offset, blob):
            raise Refused("%s: its parts came in another order" % rel)

    def do_hash_to(self, blob: bytes, key: str, upto: int) -> None:
        if key not in self._hashes:
            self._hashes[key] = FollowingHash(self._partials[key].path, UPLOAD)
        self._hashes[key].extend(upto)

    def do_commit(
        self, blob: bytes, key: str, cache: str, digest: str | None, mode: int, mtime_ns: int, sync: bool
    ) -> Any:
        partial, arriving = self._partials.pop(key), self._arriving.pop(key, None)
        if arriving is not None and arriving.size == partial.size:
            found = arriving.digest()
        else:
            found = (self._hashes.pop(key, None) or FollowingHash(partial.path, UPLOAD)).digest(partial.size)
        known = self._cache(cache, UPLOAD)
        known.remember(partial.target, partial.finish(found, digest, mode, mtime_ns, sync), found)
        known.save()
        return {"digest": found}

    def do_abandon(self, blob: bytes, key: str) -> None:
        """The file changed at the other end."""
        hashing, partial = self._hashes.pop(key, None), self._partials.pop(key, None)
        if hashing is not None:
            hashing.stop()
        if partial is not None:
            partial.close()
            partial.discard()

    def do_sync(self, blob: bytes) -> None:
        os.sync()

    def do_get_many(self, blob: bytes, root: str, files: list[str], pack: bool) -> Any:
        """Small files whole, with their hashes."""
        paths, sizes, parts = self._root(root), [], []
        for rel in files:
            try:
                with open(paths.of(rel), "rb") as file:
                    data = file.read()
            except (OSError, Refused) as error:
                sizes.append([-1, str(error)])
                continue
            sizes.append([len(data), new_hash(DOWNLOAD, data).hexdigest()])
            parts.append(data)
        data = b"".join(parts)
        return {"sizes": sizes, "packed": pack}, zlib.compress(data, 1) if pack else data

    def do_get(self, blob: bytes, root: str, rel: str, offset: int, length: int, stamp: list[int], pack: bool) -> Any:
        with open(self._root(root).of(rel), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if [status.st_size, status.st_mtime_ns, status.st_ino] != stamp:
                return {"changed": True}
            file.seek(offset)
            data = file.read(length)
            while len(data) < length:
                more = file.read(length - len(data))
                if not more:
                    return {"changed": True}
                data += more
        return {"packed": pack}, zlib.compress(data, 1) if pack else data

    def do_hash(self, blob: bytes, root: str, rel: str, cache: str) -> Any:
        path = self._root(root).of(rel)
        known = self._cache(cache, DOWNLOAD)
        digest = known.of(path, os.stat(path))
        known.save()
        return {"digest": digest}

    def do_delete(self, blob: bytes, root: str, files: list[str]) -> Any:
        """What the other end no longer has; folders only where they are empty then."""
        paths = self._root(root)
        for rel in files:
            try:
                path = paths.of(rel)
                if os.path.isdir(path) and not os.path.islink(path):
                    os.rmdir(path)
                else:
                    os.unlink(path)
            except OSError:
                continue
        return {}

    def do_hello(self, blob: bytes) -> Any:
        import base64

        user = base64.b64encode(os.fsencode(os.path.expanduser("~"))).decode()
        return {"pid": os.getpid(), "python": list(sys.version_info[:3]), "executable": sys.executable, "home": user}


def serve(stdin: BinaryIO, stdout: BinaryIO) -> None:
    agent = Agent()
    while True:
        try:
            head, size = HEAD.unpack(read_exactly(stdin, HEAD.size))
            if max(head, size) > MOST_BYTES:
                return
            request = json.loads(read_exactly(stdin, head))
            blob = read_exactly(stdin, size)
        except EOFError:
            return
        fields, data = agent.answer(request, blob)
        text = json.dumps(fields).encode()
        stdout.write(HEAD.pack(len(text), len(data)) + text)
        stdout.write(data)
        stdout.flush()


def main(socket: socket.socket | None) -> None:
    """`socket`: listens for channels of more agents."""
    if socket is not None:
        accept(socket, serve)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)  # the link is gone: nobody reads a traceback
