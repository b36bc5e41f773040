"""What a machine is and what disturbs it, told from trees of files that are other machines, and from this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moestream import _threads
from moestream.bench import disk, machine
from moestream.bench.disk import BlockDevice
from moestream.bench.machine import FLAGS, Watch, describe_disk, describe_machine

CORES = 4
SECOND = os.sysconf("SC_CLK_TCK")  # in ticks
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KERNEL_THREAD = 0x00200000
DMI = "sys/class/dmi/id"


class Tree:
    """The files of a quiet machine with four cores, on which we are one process. All of them can be changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ticks = dict.fromkeys(("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"), 1000)
        self.write("proc/loadavg", "0.10 0.10 0.10 1/100 4321\n")
        self.write("proc/vmstat", "pswpin 100\npswpout 100\n")
        self.write("proc/meminfo", "MemTotal:       16000000 kB\nMemAvailable:   12000000 kB\n")
        self.write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=5000000\n")
        self.process(1, name="init", parent=0)
        self.process(os.getpid(), name="python")
        self.pass_time()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        # A watch may read it at any time.
        (self.root / "new").write_text(text)
        os.replace(self.root / "new", self.root / path)

    def process(
        self, pid: int, *, name: str = "x", parent: int = 1, ticks: int = 0, of_children: int = 0, flags: int = 0
    ) -> None:
        times = f"{ticks - ticks // 3} {ticks // 3} {of_children} 0"
        self.write(
            f"proc/{pid}/stat", f"{pid} ({name}) S {parent} 1 1 0 -1 {flags} 0 0 0 0 {times} 20 0 1 0 {100 + pid} 0 0\n"
        )

    def ends(self, pid: int) -> None:
        shutil.rmtree(self.root / "proc" / str(pid))

    def pass_time(self, seconds: float = 10, **used: int) -> None:
        """Time passes on all cores, idle but for the ticks given."""
        for name, ticks in used.items():
            self.ticks[name] += ticks
        self.ticks["idle"] += int(CORES * seconds * SECOND) - sum(used.values())
        cores = "".join(f"cpu{core} 0 0 0 0 0 0 0 0 0 0\n" for core in range(CORES))
        self.write("proc/stat", f"cpu  {' '.join(map(str, self.ticks.values()))} 0 0\n{cores}btime 1\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# ------------------------------------------------------------------------------------------------- what this machine is


def test_this_machine_is_described_and_fits_in_json() -> None:
    described = describe_machine()
    record = json.loads(json.dumps(described.as_dict()))
    assert record == described.as_dict()
    assert record["cpu"] == _threads.processor()
    assert 1 <= record["cores_usable"] <= record["cores_logical"] == os.cpu_count()
    assert record["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    assert set(record["flags"]) <= set(FLAGS)
    assert record["kernel"] == f"Linux {os.uname().release}"
    assert list(record["versions"]) == ["moestream", "llama-cpp-python", "numpy", "llama.cpp", "ggml", "ggml-commit"]
    assert all(record["versions"].values())
    assert str(Path.home()) not in json.dumps(record)


X86 = """processor\t: 0
model name\t: AMD Ryzen 7 7840U w/ Radeon 780M Graphics
flags\t\t: fpu sse2 ssse3 fma f16c avx avx2 avx512f avx512_vnni

processor\t: 1
model name\t: AMD Ryzen 7 7840U w/ Radeon 780M Graphics
flags\t\t: fpu sse2 ssse3 fma f16c avx avx2 avx512f avx512_vnni
"""
ARM = """processor\t: 0
Features\t: fp asimd aes crc32 asimdhp asimddp
CPU implementer\t: 0x41
CPU part\t: 0xd05

processor\t: 1
Features\t: fp asimd aes crc32 asimdhp asimddp
CPU implementer\t: 0x41
CPU part\t: 0xd0b

processor\t: 2
Features\t: fp asimd aes crc32 asimdhp asimddp
CPU implementer\t: 0x41
CPU part\t: 0xd0b
"""


def test_a_laptop(tree: Tree) -> None:
    tree.write("proc/cpuinfo", X86)
    tree.write("etc/os-release", 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n')
    tree.write("sys/class/dmi/id/sys_vendor", "LENOVO\n")
    tree.write("sys/class/dmi/id/product_name", "21AH\n")
    for core, (now, governor) in enumerate(
        [(400_000, "powersave"), (3_100_000, "powersave"), (400_000, "performance")]
    ):
        tree.write(f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", f"{now}\n")
        tree.write(f"sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq", "5100000\n")
        tree.write(f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor", f"{governor}\n")
    laptop = describe_machine(root=tree.root)
    assert laptop.cpu == "AMD Ryzen 7 7840U w/ Radeon 780M Graphics"
    assert laptop.flags == ("ssse3", "avx", "avx2", "f16c", "fma", "avx512f", "avx512_vnni")
    assert laptop.system == "Debian GNU/Linux 12 (bookworm)"
    assert laptop.governor == "performance, powersave"
    assert laptop.frequency_mhz == (3100.0, 5100.0)
    assert laptop.virtual is None


def test_an_arm_processor_is_named_by_its_numbers(tree: Tree) -> None:
    tree.write("proc/cpuinfo", ARM)
    board = describe_machine(root=tree.root)
    assert board.cpu == "implementer 0x41 part 0xd05, implementer 0x41 part 0xd0b"
    assert board.flags == ("asimd", "asimdhp", "asimddp")
    assert (board.governor, board.frequency_mhz, board.virtual) == (None, None, None)


def test_an_arm_board_is_named_too(tree: Tree) -> None:
    tree.write("proc/cpuinfo", ARM)
    tree.write("proc/device-tree/model", "Radxa ROCK 5B\0")
    board = describe_machine(root=tree.root)
    assert board.cpu == "Radxa ROCK 5B (implementer 0x41 part 0xd05, implementer 0x41 part 0xd0b)"


def test_a_machine_that_tells_nothing_is_described_all_the_same(tmp_path: Path) -> None:
    bare = describe_machine(root=tmp_path)
    assert bare.cpu
    assert bare.flags == ()
    assert (bare.governor, bare.frequency_mhz, bare.virtual) == (None, None, None)


@pytest.mark.parametrize(
    ("files", "virtual"),
    [
        ({"proc/cpuinfo": "flags : fpu hypervisor\n"}, "unnamed"),
        ({"proc/cpuinfo": "flags : fpu hypervisor\n", f"{DMI}/sys_vendor": "QEMU\n"}, "QEMU"),
        ({"sys/hypervisor/type": "xen\n"}, "xen"),
        ({"proc/device-tree/hypervisor/compatible": "linux,kvm\0"}, "linux,kvm"),
        ({f"{DMI}/sys_vendor": "Amazon EC2\n", f"{DMI}/product_name": "m7g.large\n"}, "Amazon EC2 m7g.large"),
        ({f"{DMI}/sys_vendor": "Amazon EC2\n", f"{DMI}/product_name": "m7g.metal\n"}, None),
    ],
)  # fmt: skip
def test_a_hypervisor(tree: Tree, files: dict[str, str], virtual: str | None) -> None:
    for path, text in files.items():
        tree.write(path, text)
    assert describe_machine(root=tree.root).virtual == virtual


# --------------------------------------------------------------------------------------------------- where it came from


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    return subprocess.run(
        ["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("first\n")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    git(tmp_path, "tag", "v1")
    return tmp_path


def origin(folder: Path) -> str:
    return json.dumps({"dir_info": {}, "url": folder.as_uri()})


def test_the_commit_of_the_checkout_it_was_installed_from(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert machine._commit(origin(checkout)) == head
    (checkout / "file").write_text("changed\n")
    assert machine._commit(origin(checkout)) == f"{head}-dirty"


def test_no_commit_of_a_checkout_in_which_the_sources_only_lie(checkout: Path) -> None:
    (checkout / "sources").mkdir()
    assert machine._commit(origin(checkout / "sources")) is None


def test_no_commit_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert machine._commit(origin(checkout)) is None


def test_the_commit_that_pip_noted() -> None:
    noted = {"url": "https://example.org/moestream.git", "vcs_info": {"vcs": "git", "commit_id": "0123abcd"}}
    assert machine._commit(json.dumps(noted)) == "0123abcd"


@pytest.mark.parametrize("noted", [None, '{"url": "https://example.org/moestream.whl", "archive_info": {}}'])
def test_no_commit_of_a_package(noted: str | None) -> None:
    assert machine._commit(noted) is None


# ------------------------------------------------------------------------------------------------------------- its disk


def mounted(*mounts: tuple[str, str, str]) -> str:
    return "".join(
        f"{n} 1 8:{n} / {point} rw shared:1 - {kind} {source} rw\n"
        for n, (point, kind, source) in enumerate(mounts, 20)
    )


def test_this_disk_is_described_and_fits_in_json(tmp_path: Path) -> None:
    described = describe_disk(tmp_path)
    assert json.loads(json.dumps(described.as_dict())) == described.as_dict()
    assert described.file_system
    assert described.size_bytes == shutil.disk_usage(tmp_path).total
    if described.device:
        assert described.read_ahead_kib == BlockDevice(described.device, "").read_ahead_kib


def test_a_file_in_memory_has_a_file_system_and_no_device() -> None:
    shm = Path("/dev/shm")
    if not os.path.ismount(shm):
        pytest.skip("/dev/shm is no file system of its own here")
    described = describe_disk(shm)
    assert (described.device, described.model, described.file_system, described.mount) == ("", "", "tmpfs", "/dev/shm")
    assert described.size_bytes == shutil.disk_usage(shm).total
    assert (described.rotational, described.read_ahead_kib, described.scheduler) == (None, None, None)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        describe_disk(tmp_path / "no-such-file")


def test_a_file_on_a_partition_is_on_the_disk_that_has_the_partition(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.write("proc/self/mountinfo", mounted(("/", "ext4", "/dev/sda2")))
    tree.write("sys/devices/pci/sda/dev", "8:0\n")
    tree.write("sys/devices/pci/sda/sda2/dev", "8:2\n")
    tree.write("sys/devices/pci/sda/sda2/partition", "2\n")
    tree.write("sys/devices/pci/sda/device/model", "Samsung SSD 870 \n")
    tree.write("sys/devices/pci/sda/queue/rotational", "0\n")
    tree.write("sys/devices/pci/sda/queue/read_ahead_kb", "128\n")
    tree.write("sys/devices/pci/sda/queue/scheduler", "none [mq-deadline] bfq\n")
    for link, target in (("sys/dev/block/8:2", "sda/sda2"), ("sys/block/sda", "sda")):
        (tree.root / link).parent.mkdir(parents=True, exist_ok=True)
        (tree.root / link).symlink_to(tree.root / "sys/devices/pci" / target)
    fake_os = SimpleNamespace(
        stat=lambda path: SimpleNamespace(st_dev=os.makedev(8, 2)), major=os.major, minor=os.minor
    )
    monkeypatch.setattr(disk, "os", fake_os)
    monkeypatch.setattr(disk, "Path", lambda *parts: tree.root.joinpath(*(part.lstrip("/") for part in parts)))
    described = describe_disk(tree.root, root=tree.root)
    assert described.device == "sda"
    assert described.model == "Samsung SSD 870"
    assert (described.file_system, described.mount) == ("ext4", "/")
    assert (described.rotational, described.read_ahead_kib, described.scheduler) == (False, 128, "mq-deadline")


def test_an_encrypted_volume_has_the_model_of_the_disk_beneath(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "block_device_of", lambda path: BlockDevice("dm-0", "253:0"))
    tree.write("sys/devices/nvme0n1/device/model", "WD_BLACK SN850X\n")
    tree.write("sys/devices/nvme0n1/nvme0n1p3/partition", "3\n")
    tree.write("sys/block/dm-0/queue/scheduler", "none\n")
    (tree.root / "sys/block/dm-0/slaves").mkdir()
    (tree.root / "sys/block/dm-0/slaves/nvme0n1p3").symlink_to(tree.root / "sys/devices/nvme0n1/nvme0n1p3")
    described = describe_disk(tree.root, root=tree.root)
    assert (described.device, described.model, described.scheduler) == ("dm-0", "WD_BLACK SN850X", "none")
    assert (described.rotational, described.read_ahead_kib) == (None, None)


def test_the_mount_that_holds_a_file_is_the_innermost_and_the_last(tree: Tree) -> None:
    models = tree.root / "my models"
    models.mkdir()
    point = str(models).replace(" ", "\\040")
    mounts = [
        (point, "ext4", "/dev/sdb"),
        (point, "xfs", "/dev/sdc"),
        ("/", "btrfs", "/dev/sda"),
        (f"{point}2", "vfat", "/dev/sdd"),
    ]
    tree.write("proc/self/mountinfo", mounted(*mounts))
    assert machine._mount_of(models / "model.gguf", tree.root) == machine._Mount(str(models), "xfs")


@pytest.mark.parametrize(
    ("mount", "shown"),
    [
        ("/home/ada", "~"),
        ("/home/ada/models", "~/models"),
        ("/run/media/ada/SSD", "/run/media/~/SSD"),
        ("/home", "/home"),
        ("/mnt/adamant", "/mnt/adamant"),
    ],
)
def test_a_mount_point_does_not_tell_who_the_user_is(mount: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert machine._without_home(mount) == shown


# ----------------------------------------------------------------------------------------------- energy and temperature


def package(tree: Tree, name: str, microjoules: int, *, kind: str, most: int = 10_000_000) -> None:
    tree.write(f"sys/class/powercap/{name}/name", f"{kind}\n")
    tree.write(f"sys/class/powercap/{name}/energy_uj", f"{microjoules}\n")
    tree.write(f"sys/class/powercap/{name}/max_energy_range_uj", f"{most}\n")


def test_energy_is_that_of_all_packages_and_nothing_twice(tree: Tree) -> None:
    kinds = {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:0:0": "core", "intel-rapl:2": "psys"}
    for name, kind in kinds.items():
        package(tree, name, 1_000_000, kind=kind)
    with Watch(root=tree.root) as watch:
        for name, kind in kinds.items():
            package(tree, name, 3_500_000, kind=kind)
    assert watch.energy_j == pytest.approx(5.0)


def test_a_counter_of_energy_goes_round(tree: Tree) -> None:
    package(tree, "intel-rapl:0", 9_000_000, kind="package-0")
    with Watch(root=tree.root) as watch:
        package(tree, "intel-rapl:0", 2_000_000, kind="package-0")
    assert watch.energy_j == pytest.approx(3.0)


def test_a_counter_of_energy_that_goes_round_twice_is_looked_at_in_between(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "SAMPLE_S", 0.01)
    package(tree, "intel-rapl:0", 9_000_000, kind="package-0")
    with Watch(root=tree.root) as watch:
        for microjoules in (2_000_000, 9_000_000, 2_000_000):
            tree.write("sys/class/powercap/intel-rapl:0/energy_uj", f"{microjoules}\n")
            waiting_ends = time.monotonic() + 5
            while watch._samples._energy_uj != [microjoules]:
                assert time.monotonic() < waiting_ends, "nobody looked"
                time.sleep(0.001)
    assert watch.energy_j == pytest.approx(13.0)


def test_energy_that_may_not_be_read_is_none(tree: Tree) -> None:
    package(tree, "intel-rapl:0", 1_000_000, kind="package-0")
    package(tree, "intel-rapl:1", 1_000_000, kind="package-1")
    (tree.root / "sys/class/powercap/intel-rapl:1/energy_uj").unlink()
    # Root may read all files; to read a folder is an OSError for everyone.
    (tree.root / "sys/class/powercap/intel-rapl:1/energy_uj").mkdir()
    with Watch(root=tree.root) as watch:
        package(tree, "intel-rapl:0", 2_000_000, kind="package-0")
    assert watch.energy_j is None
    assert watch.busy == ()


def test_no_counter_of_energy_and_no_sensor(tree: Tree) -> None:
    with Watch(root=tree.root) as watch:
        pass
    assert (watch.energy_j, watch.temperature_c) == (None, None)


@pytest.mark.parametrize(
    ("files", "temperature_c"),
    [
        ({"hwmon/hwmon0/name": "nvme", "hwmon/hwmon0/temp1_input": "90000",
          "hwmon/hwmon1/name": "coretemp", "hwmon/hwmon1/temp1_input": "61000", "hwmon/hwmon1/temp2_input": "64500",
          "thermal/thermal_zone0/type": "acpitz", "thermal/thermal_zone0/temp": "70000"}, 64.5),
        ({"thermal/thermal_zone0/type": "acpitz", "thermal/thermal_zone0/temp": "70000",
          "thermal/thermal_zone1/type": "x86_pkg_temp", "thermal/thermal_zone1/temp": "55000"}, 55.0),
        ({"thermal/thermal_zone0/type": "acpitz", "thermal/thermal_zone0/temp": "42000"}, 42.0),
        ({"thermal/thermal_zone0/type": "acpitz", "thermal/thermal_zone0/temp": "-274000"}, None),
    ],
)  # fmt: skip
def test_temperature_is_the_processors_if_a_sensor_is_its(
    tree: Tree, files: dict[str, str], temperature_c: float | None
) -> None:
    for path, text in files.items():
        tree.write(f"sys/class/{path}", f"{text}\n")
    with Watch(root=tree.root) as watch:
        pass
    assert watch.temperature_c == temperature_c


# -------------------------------------------------------------------------------------------------------- what disturbs


def test_nothing_is_said_of_a_quiet_machine_that_works_for_us_alone(tree: Tree) -> None:
    tree.write("sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", "7\n")
    with Watch(root=tree.root) as watch:
        tree.process(os.getpid(), ticks=20 * SECOND)
        tree.process(700, name="idle-desktop", ticks=SECOND)
        tree.pass_time(user=21 * SECOND, irq=SECOND, iowait=10 * SECOND, steal=SECOND // 10)
    assert watch.busy == ()


def test_other_processes_are_counted_and_the_busiest_is_named(tree: Tree) -> None:
    tree.process(4312, name="Web (Content) 1", ticks=9000)
    tree.process(700, name="old", ticks=90000)
    with Watch(root=tree.root) as watch:
        tree.process(4312, name="Web (Content) 1", ticks=9000 + 5 * SECOND)
        tree.process(700, name="old", ticks=90000 + SECOND)
        tree.process(os.getpid(), ticks=20 * SECOND)
        tree.pass_time(user=24 * SECOND, system=2 * SECOND)
    assert watch.busy == (
        "other processes used 0.60 of 4 cores while it was measured (the most: Web (Content) 1, pid 4312)",
    )


def test_nobody_is_named_where_the_others_cannot_be_seen(tree: Tree) -> None:
    with Watch(root=tree.root) as watch:
        tree.process(700, name="innocent", ticks=SECOND // 10)
        tree.pass_time(user=10 * SECOND)
    assert watch.busy == ("other processes used 1.00 of 4 cores while it was measured",)


def test_a_build_is_named_though_its_compilers_come_and_go(tree: Tree) -> None:
    tree.process(600, name="make", of_children=0)
    tree.process(601, name="cc1", parent=600, ticks=5000)
    with Watch(root=tree.root) as watch:
        tree.ends(601)
        tree.process(600, name="make", of_children=5000 + 8 * SECOND)
        tree.process(700, name="firefox", ticks=2 * SECOND)
        tree.pass_time(user=10 * SECOND)
    assert watch.busy == ("other processes used 1.00 of 4 cores while it was measured (the most: make, pid 600)",)


def test_a_shell_is_not_blamed_for_what_a_child_of_it_had_used_before(tree: Tree) -> None:
    tree.process(600, name="bash", of_children=0)
    tree.process(601, name="old-server", parent=600, ticks=500 * SECOND)
    with Watch(root=tree.root) as watch:
        tree.ends(601)
        tree.process(600, name="bash", of_children=500 * SECOND)
        tree.process(700, name="firefox", ticks=2 * SECOND)
        tree.pass_time(user=2 * SECOND)
    assert watch.busy == ("other processes used 0.20 of 4 cores while it was measured (the most: firefox, pid 700)",)


def test_children_that_work_for_us_are_ours_also_when_they_have_ended(tree: Tree) -> None:
    tree.process(800, name="worker", parent=os.getpid(), ticks=300)
    with Watch(root=tree.root) as watch:
        tree.ends(800)
        tree.process(os.getpid(), ticks=100, of_children=300 + 10 * SECOND)  # 800, and one that began and ended
        tree.process(801, name="worker", parent=os.getpid(), ticks=5 * SECOND)
        tree.process(802, name="grandchild", parent=801, ticks=5 * SECOND)
        tree.pass_time(user=20 * SECOND)
    assert watch.busy == ()


def test_a_child_that_lost_its_parent_meanwhile_is_ours(tree: Tree) -> None:
    tree.process(800, name="shell", parent=os.getpid())
    tree.process(801, name="worker", parent=800)
    with Watch(root=tree.root) as watch:
        tree.ends(800)
        tree.process(801, name="worker", parent=1, ticks=10 * SECOND)
        tree.pass_time(user=10 * SECOND)
    assert watch.busy == ()


def test_a_process_that_is_given_is_ours_with_its_children(tree: Tree) -> None:
    tree.process(900, name="server")
    with Watch([900], root=tree.root) as watch:
        tree.process(900, name="server", ticks=10 * SECOND)
        tree.process(901, name="thread", parent=900, ticks=10 * SECOND)
        tree.pass_time(user=20 * SECOND)
    assert watch.busy == ()


def test_a_process_that_is_given_and_ends_takes_nothing_from_what_the_rest_of_us_used(tree: Tree) -> None:
    tree.process(900, name="server", ticks=5000 * SECOND)
    with Watch([900], root=tree.root) as watch:
        tree.ends(900)
        tree.process(os.getpid(), ticks=20 * SECOND)
        tree.pass_time(user=20 * SECOND)
    assert watch.busy == ()


def test_the_kernels_own_threads_work_for_us(tree: Tree) -> None:
    with Watch(root=tree.root) as watch:
        tree.process(60, name="kswapd0", parent=2, ticks=9 * SECOND, flags=KERNEL_THREAD)
        tree.pass_time(system=9 * SECOND)
    assert watch.busy == ()


def test_a_load_before_that_is_not_ours(tree: Tree) -> None:
    tree.write("proc/loadavg", "3.20 1.00 1.00 1/100 4321\n")
    with Watch(root=tree.root) as watch:
        tree.pass_time()
    assert watch.busy == ("the machine was busy before it began (load 3.20 on 4 cores)",)


def test_the_load_of_our_own_work_before_is_no_disturbance(tree: Tree) -> None:
    tree.write("proc/loadavg", "3.20 1.00 1.00 1/100 4321\n")
    tree.process(os.getpid(), of_children=190 * SECOND)
    with Watch(root=tree.root) as watch:
        tree.pass_time()
    assert watch.busy == ()


def test_a_hypervisor_that_takes_its_share(tree: Tree) -> None:
    with Watch(root=tree.root) as watch:
        tree.pass_time(steal=2 * SECOND)
    assert watch.busy == ("the hypervisor took 5% of the processor time",)


def test_a_processor_that_is_throttled_for_heat(tree: Tree) -> None:
    folder = "sys/devices/system/cpu/cpu{}/thermal_throttle/{}_throttle_count"
    counts = [(0, "core", 5), (1, "core", 5), (0, "package", 90), (1, "package", 90)]
    for core, kind, count in counts:
        tree.write(folder.format(core, kind), f"{count}\n")
    with Watch(root=tree.root) as watch:
        tree.write(folder.format(1, "core"), "17\n")
        tree.pass_time()
    assert watch.busy == ("the CPU was throttled for heat (12 times)",)


def clock(tree: Tree, mhz: int) -> None:
    tree.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", f"{mhz * 1000}\n")
    tree.write("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "4200000\n")
    tree.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")


def test_a_processor_that_works_at_a_low_clock(tree: Tree) -> None:
    clock(tree, 1400)
    with Watch(root=tree.root) as watch:
        tree.process(os.getpid(), ticks=8 * SECOND)
        tree.pass_time(user=8 * SECOND)
    assert watch.busy == ("the CPU ran at 1.40 GHz of its 4.20 (governor: powersave)",)


@pytest.mark.parametrize(("mhz", "cores"), [(3000, 4.0), (1400, 0.2)], ids=["all cores at once", "mostly waiting"])
def test_a_clock_that_is_low_for_good_reason(tree: Tree, mhz: int, cores: float) -> None:
    clock(tree, mhz)
    ticks = int(cores * 10 * SECOND)
    with Watch(root=tree.root) as watch:
        tree.process(os.getpid(), ticks=ticks)
        tree.pass_time(user=ticks)
    assert watch.busy == ()


def test_swapping(tree: Tree) -> None:
    with Watch(root=tree.root) as watch:
        tree.write("proc/vmstat", f"pswpin {100 + (8 << 20) // PAGE_BYTES}\npswpout {100 + (4 << 20) // PAGE_BYTES}\n")
        tree.pass_time()
    assert watch.busy == ("the machine was swapping (12 MiB)",)


@pytest.mark.parametrize(
    ("available", "busy"),
    [
        (800_000, ("memory was short: only 5% was available, and programs waited for it 20% of the time",)),
        (12_000_000, ()),
    ],
    ids=["the machine is short of memory", "it has plenty, so a limit of ours it was"],
)
def test_waiting_for_memory(tree: Tree, available: int, busy: tuple[str, ...]) -> None:
    with Watch(root=tree.root) as watch:
        tree.write("proc/meminfo", f"MemTotal:       16000000 kB\nMemAvailable:   {available} kB\n")
        tree.write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=7000000\nfull total=0\n")
        tree.pass_time()
    assert watch.busy == busy


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    with Watch(root=tmp_path) as watch:
        pass
    assert (watch.energy_j, watch.temperature_c, watch.busy) == (None, None, ())


def test_what_fails_inside_is_raised_and_what_was_seen_is_kept(tree: Tree) -> None:
    with pytest.raises(ZeroDivisionError), Watch(root=tree.root) as watch:
        tree.pass_time(steal=4 * SECOND)
        _ = 1 / 0
    assert watch.busy == ("the hypervisor took 10% of the processor time",)


# ------------------------------------------------------------------------------------------------------ on this machine


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that spins and is no descendant of ours: the shell that started it has ended."""
    spin = f"{sys.executable} -c 'while True: pass' > /dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", spin], capture_output=True, text=True, check=True).stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)


def others_used_s(watch: Watch, duration_s: float) -> float:
    """Seconds of processor time that others are said to have used; 0 if nothing is said of them."""
    said = re.search(r"other processes used ([0-9.]+) of", " ".join(watch.busy))
    return float(said[1]) * duration_s if said else 0.0


def seconds_of(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / SECOND


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what processes use")
def test_a_spinning_process_is_another_unless_it_is_given(stranger: int) -> None:
    # Two watches at once, for this machine may be busy with something else too.
    began, used = time.monotonic(), seconds_of(stranger)
    with Watch() as alone, Watch([stranger]) as with_it:
        time.sleep(2)
    duration, used = time.monotonic() - began, seconds_of(stranger) - used
    assert used > 0.2, "the spinning process got no processor time"
    assert others_used_s(alone, duration) - others_used_s(with_it, duration) == pytest.approx(used, rel=0.25, abs=0.15)
    assert str(stranger) not in " ".join(with_it.busy)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what processes use")
def test_a_spinning_child_of_ours_is_not_named() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        with Watch() as watch:
            time.sleep(1)
        used = seconds_of(child.pid)
        child.kill()
    assert used > 0.1, "the spinning process got no processor time"
    assert f"pid {child.pid}" not in " ".join(watch.busy)
