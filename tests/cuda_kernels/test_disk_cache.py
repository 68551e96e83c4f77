"""Built kernels are kept in files; what is broken or could be another user's is built again."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from in_process import run, start

# A kernel is built, and built again as in a new process, after a file was changed by `change`.
AGAIN = """
    import os
    from pathlib import Path
    folder = Path(os.environ["TORCH_ORT_KERNEL_CACHE_DIR"])

    def built(text=AXPY):
        cuda.forget_builds()
        module = cuda.build("axpy", text)
        y = fake.put([1.0])
        axpy(module, y.value, y.value, 1.0, 1)
        cuda.synchronize()
        assert fake.get(y, 1) == [2.0]
        return cuda.build_counts()

    def files():
        return sorted(path.name for path in folder.iterdir())
"""


def cached(code: str, folder: Path, size: int = 1 << 30) -> str:
    settings = {
        "TORCH_ORT_KERNEL_CACHE_DIR": str(folder),
        "TORCH_ORT_KERNEL_CACHE_BYTES": str(size),
    }
    return run(textwrap.dedent(AGAIN) + textwrap.dedent(code), **settings)


def test_a_later_process_compiles_nothing(tmp_path):
    code = """
        print(built(), cuda.disk_cache_problem())
        assert len(files()) == 1
    """
    folder = tmp_path / "new" / "folder"
    assert cached(code, folder) == "{'compiled': 1, 'found_on_disk': 0} \n"
    assert cached(code, folder) == "{'compiled': 0, 'found_on_disk': 1} \n"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


def test_the_usual_folder(tmp_path):
    code = "cuda.build('axpy', AXPY).wait()"
    size = {"TORCH_ORT_KERNEL_CACHE_BYTES": str(1 << 20)}
    run(code, **size, XDG_CACHE_HOME=str(tmp_path / "caches"))
    run(code, **size, XDG_CACHE_HOME="not/absolute", HOME=str(tmp_path / "home"))
    for caches in ("caches", "home/.cache"):
        assert len(list((tmp_path / caches / "torch_ort" / "kernels").iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        "path.write_bytes(whole[:-1])",
        "path.write_bytes(whole[:30])",
        "path.write_bytes(b'')",
        "path.write_bytes(whole + b'x')",
        "path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])",
        "path.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])",
        "path.write_bytes(whole[:31] + bytes([255]) + whole[32:])",
        "path.write_bytes(b'another file of no meaning\\n' * 9)",
        "path.chmod(0o620)",
        "path.chmod(0o602)",
        "path.unlink(); path.symlink_to(other)",
        "path.write_bytes(other.read_bytes())",
    ],
    ids=[
        "truncated", "truncated in its head", "empty", "longer", "a bit of the cubin",
        "a bit of the checksum", "a size", "no cubin", "writable by the group",
        "writable by others", "a link", "of another text",
    ],
)  # fmt: skip
def test_what_cannot_be_believed_is_built_again(change, tmp_path):
    cached(
        f"""
        assert built() == {{"compiled": 1, "found_on_disk": 0}}
        path = folder / files()[0]
        whole = path.read_bytes()
        assert built(AXPY + "// another")["compiled"] == 1
        other, = (folder / name for name in files() if name != path.name)
        {change}
        assert built() == {{"compiled": 1, "found_on_disk": 0}}
        # And the file is right again.
        assert path.read_bytes() == whole
        assert not path.is_symlink()
        assert built() == {{"compiled": 0, "found_on_disk": 1}}
        assert built(AXPY + "// another") == {{"compiled": 0, "found_on_disk": 1}}
        """,
        tmp_path / "folder",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("what", ["path", "folder"])
def test_what_belongs_to_another_user(what, tmp_path):
    words = cached(
        f"""
        assert built()["compiled"] == 1
        path = folder / files()[0]
        os.chown({what}, 12345, 12345)
        assert built() == {{"compiled": 1, "found_on_disk": 0}}
        print(cuda.disk_cache_problem())
        """,
        tmp_path / "folder",
    )
    refused = f"{tmp_path / 'folder'}: another user can write there"
    assert words.strip() == ("" if what == "path" else refused)


def test_a_folder_that_others_can_write(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    words = cached("assert built()['compiled'] == 1; print(cuda.disk_cache_problem())", folder)
    assert words.strip() == f"{folder}: another user can write there"
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "folder"
    words = cached("assert built()['compiled'] == 1; print(cuda.disk_cache_problem())", folder)
    assert words.strip() == f"{folder}: Not a directory"


def test_it_can_be_off(tmp_path):
    cached("assert built()['compiled'] == 1", tmp_path / "folder", size=0)
    assert list(tmp_path.iterdir()) == []


def test_those_used_longest_ago_go_first(tmp_path):
    cached(
        """
        texts = [AXPY + "//" + str(i) for i in range(9)]
        by_text = {}
        for i, text in enumerate(texts[:4]):
            before = set(files()) if folder.exists() else set()
            assert built(text)["compiled"] == 1
            name, = set(files()) - before
            by_text[i] = name
            os.utime(folder / name, (1000 + i, 1000 + i))
        size = (folder / name).stat().st_size
        os.environ["TORCH_ORT_KERNEL_CACHE_BYTES"] = str(size * 4 + size // 2)
        configure()
        assert built(texts[0])["found_on_disk"] == 1  # used last, from now on
        assert built(texts[4])["compiled"] == 1
        assert by_text[0] in files()
        assert by_text[1] not in files()
        assert by_text[2] not in files()
        assert len(files()) == 3
        os.environ["TORCH_ORT_KERNEL_CACHE_BYTES"] = str(size // 2)
        configure()
        assert built(texts[5])["compiled"] == 1  # larger than all that may be kept
        assert len(files()) == 3
        """,
        tmp_path / "folder",
    )


def test_another_compiler_or_other_flags_are_another_key(tmp_path):
    cached(
        """
        for flags in ([], ["-DX"], ["-DX", "-DY"], ["-DX\\n5 -DY"]):
            cuda.compile("axpy", AXPY, "sm_90", flags).wait()
        cuda.compile("axpy", AXPY, "sm_80").wait()
        assert cuda.build_counts() == {"compiled": 5, "found_on_disk": 0}
        assert len(files()) == 5
        """,
        tmp_path / "folder",
    )


def test_processes_may_build_into_one_folder_at_once(tmp_path):
    folder, outputs = tmp_path / "folder", tmp_path / "outputs"
    outputs.mkdir()
    variables = {
        "TORCH_ORT_KERNEL_CACHE_DIR": str(folder),
        "TORCH_ORT_KERNEL_CACHE_BYTES": str(1 << 30),
    }
    code = """
for each in [cuda.build("axpy", AXPY + f"// {i}") for i in range(6)]:
    each.wait()
print(cuda.build_counts()["found_on_disk"])
"""
    for program in [start(outputs, code, **variables) for _ in range(4)]:
        program.finish()
    assert len(list(folder.iterdir())) == 6
    assert run(code, **variables) == "6\n"
