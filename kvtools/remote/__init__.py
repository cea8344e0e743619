"""Checkpoints in object stores: a remote folder stands for itself as a local one, filled as it is read.

url.py           which URLs are taken, and what is refused of them
mirror.py        from a URL to the local path that stands for it, and back
listing.py       what lies in a remote folder
store.py         one store: its file system of fsspec, tries and backoff
fault.py         what a store's errors mean, in words without credentials
ranges.py        one range of a file, from wherever it stood when a connection died
remote_file.py   a file that is filled in blocks as they are asked for
block_cache.py   how many blocks lie on this disk
stored.py        what readers ask for bytes before they touch them, whether a file is remote or not
upload.py        writing: everything in parallel, and what makes it visible last

A reader opens paths as ever. Before it touches bytes it asks for them: `with stored(path).held(start, stop): ...`. That
is nothing for a file of this machine.
"""
