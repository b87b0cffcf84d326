use std::os::unix::fs::symlink;

use super::*;

#[test]
fn a_devices_counts_are_read() {
    let text = "24 1 25 45 39 2 69 74 0 46 12 29 4 26 7 52 46";
    assert_eq!(Counts::parse(text), Some(Counts { reads: 24, flushes: 52 }));
    assert_eq!(Counts::parse("24 1 25"), None);
}

#[test]
fn this_folder_is_somewhere() {
    let info = folder(Path::new("/proc/self")).unwrap();
    assert_eq!((info.name.as_str(), info.device), ("proc", None));
    let here = folder(&std::env::temp_dir()).unwrap();
    assert!(here.total_bytes > 0 && here.mount_options.is_some(), "{here:?}");
}

/// A temporary /sys and /dev with the files and links that the kernel provides.
struct Fake {
    root: tempfile::TempDir,
}

impl Fake {
    fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap() }
    }

    fn system(&self) -> System {
        System { sys: self.root.path().join("sys"), dev: self.root.path().join("dev") }
    }

    /// Adds a device with its number, its attributes and the devices below it.
    fn device(&self, at: &str, number: (u32, u32), attributes: &[(&str, &str)], slaves: &[&str]) {
        let folder = self.root.path().join("sys/devices").join(at);
        for (name, value) in attributes {
            let file = folder.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{value}\n")).unwrap();
        }
        fs::create_dir_all(folder.join("slaves")).unwrap();
        for slave in slaves {
            let below = self.root.path().join("sys/devices").join(slave);
            symlink(&below, folder.join("slaves").join(below.file_name().unwrap())).unwrap();
        }
        let numbers = self.root.path().join("sys/dev/block");
        fs::create_dir_all(&numbers).unwrap();
        symlink(&folder, numbers.join(format!("{}:{}", number.0, number.1))).unwrap();
    }

    fn found(&self, number: (u32, u32), path: &str) -> PlaceInfo {
        self.system().device(rustix::fs::makedev(number.0, number.1), Path::new(path))
    }
}

const DISK: &[(&str, &str)] = &[
    ("device/model", "FAST 2000"),
    ("queue/rotational", "0"),
    ("queue/scheduler", "none [mq-deadline] kyber"),
    ("queue/write_cache", "write back"),
];

#[test]
fn a_volume_of_lvm_is_recognized_down_to_the_disk() {
    let fake = Fake::new();
    fake.device("pci/sda", (8, 0), DISK, &[]);
    fake.device("pci/sda/sda3", (8, 3), &[("partition", "3")], &[]);
    let crypt = [("dm/name", "secret"), ("dm/uuid", "CRYPT-LUKS2-0123-secret")];
    fake.device("virtual/block/dm-0", (253, 0), &crypt, &["pci/sda/sda3"]);
    let lvm = [
        ("dm/name", "vg0-vm--disk"),
        ("dm/uuid", "LVM-AbCdEf"),
        ("queue/rotational", "0"),
        ("queue/scheduler", "none"),
    ];
    fake.device("virtual/block/dm-1", (253, 1), &lvm, &["virtual/block/dm-0"]);

    let info = fake.found((253, 1), "/dev/vg0/vm-disk");
    assert_eq!((info.name.as_str(), info.device.as_deref()), ("lvm", Some("/dev/dm-1")));
    assert_eq!(
        info.beneath,
        [
            "dm-1: LVM volume vg0/vm-disk",
            "dm-0: encrypted volume secret",
            "partition sda3",
            "sda: disk FAST 2000"
        ]
    );
    assert_eq!(info.scheduler.as_deref(), Some("none"));
    assert_eq!(fake.found((253, 0), "").name, "crypt");
    // A partition reports its disk's queue.
    let part = fake.found((8, 3), "/dev/sda3");
    assert_eq!((part.name.as_str(), part.rotational), ("partition", Some(false)));
    assert_eq!(part.scheduler.as_deref(), Some("mq-deadline"));
    assert_eq!(part.write_cache.as_deref(), Some("write back"));
    assert_eq!(fake.found((9, 9), "/dev/none"), PlaceInfo::default());
}

#[test]
fn other_kinds_of_the_device_mapper_and_raid_are_told_apart() {
    for (uuid, word) in
        [("mpath-3600", "multipath"), ("part1-mpath-3600", "dm"), ("", "dm"), ("LVM-x", "lvm")]
    {
        assert_eq!(mapped("dm-5", "a", uuid).0, word, "{uuid}");
    }
    let fake = Fake::new();
    fake.device("pci/nvme0n1", (259, 0), DISK, &[]);
    fake.device("virtual/block/md0", (9, 0), &[("md/level", "raid1")], &["pci/nvme0n1"]);
    let info = fake.found((9, 0), "/dev/md0");
    assert_eq!(info.name, "md");
    assert_eq!(info.beneath, ["md0: software RAID raid1", "nvme0n1: nvme FAST 2000"]);
}

#[test]
fn a_zvol_has_its_name_however_it_is_called() {
    let fake = Fake::new();
    fake.device("virtual/block/zd0", (230, 0), &[("queue/rotational", "0")], &[]);
    fake.device("virtual/block/zd16", (230, 16), &[("queue/rotational", "0")], &[]);
    let volumes = fake.root.path().join("dev/zvol/tank/guests");
    fs::create_dir_all(&volumes).unwrap();
    symlink("../../../zd16", volumes.join("mail")).unwrap();
    symlink("../../../zd0", volumes.join("web")).unwrap();
    let named = volumes.join("mail").display().to_string();
    for path in [named.as_str(), "/dev/zd16"] {
        let info = fake.found((230, 16), path);
        assert_eq!(info.name, "zvol");
        assert_eq!(info.beneath, ["zd16: ZFS volume tank/guests/mail"], "{path}");
    }
    assert_eq!(fake.found((230, 0), "").beneath, ["zd0: ZFS volume tank/guests/web"]);
}
