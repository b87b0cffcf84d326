use std::os::unix::fs::symlink;

use super::*;

/// Counters as the kernel prints them.
fn stat(reads: u64, flushes: u64) -> String {
    format!("{reads} 1 25 45 39 2 69 74 0 46 12 29 4 26 7 {flushes} 46")
}

/// The kernel counts no flushes for partitions, volumes and arrays: their counters are always 0.
#[test]
fn flushes_are_those_of_the_whole_disk() {
    let fake = Fake::new();
    let (disk, zero, old) = (stat(100, 52), stat(24, 0), "24 1 25");
    fake.device("pci/sda", (8, 0), &[("stat", &disk), ("mq/0/nr_tags", "64")], &[]);
    fake.device("pci/sda/sda3", (8, 3), &[("partition", "3"), ("stat", &zero)], &[]);
    fake.device("pci/sdb", (8, 16), &[("stat", old), ("mq/0/nr_tags", "64")], &[]);
    let volume = |name: &str, number, slaves: &[&str]| {
        fake.device(name, number, &[("stat", &zero), ("dm/name", name)], slaves);
    };
    volume("dm-0", (253, 0), &["pci/sda/sda3"]);
    volume("dm-1", (253, 1), &["dm-0"]);
    volume("md0", (9, 0), &["pci/sda", "pci/sdb"]);
    volume("zd0", (230, 0), &[]);
    let counts = |number| fake.system().counts(&fake.found(number, ""));
    let found = |reads, flushes| Some(Counts { reads, flushes });
    assert_eq!(counts((8, 0)), found(100, Some(52)));
    for number in [(8, 3), (253, 0), (253, 1)] {
        assert_eq!(counts(number), found(24, Some(52)), "{number:?}");
    }
    // An array of two disks, a volume of ZFS, a kernel before 5.5.
    for number in [(9, 0), (230, 0), (8, 16)] {
        assert_eq!(counts(number), found(24, None), "{number:?}");
    }
    assert_eq!(fake.system().counts(&PlaceInfo::default()), None);
}

#[test]
fn a_device_is_known_by_its_identifier_after_a_restart() {
    let fake = Fake::new();
    fake.device("pci/sda", (8, 0), &[("device/wwid", "naa.5001")], &[]);
    fake.device("pci/sda/sda3", (8, 3), &[("partition", "3")], &[]);
    fake.device("pci/vda", (8, 16), &[("queue/rotational", "0")], &[]);
    let named = [("partition", "1"), ("uevent", "MAJOR=8\nPARTN=1\nPARTUUID=ab-cd")];
    fake.device("pci/vda/vda1", (8, 17), &named, &[]);
    fake.device("dm-0", (253, 0), &[("dm/uuid", "LVM-AbCd")], &["pci/sda"]);
    let found = |number| fake.system().identity(&fake.found(number, ""));
    assert_eq!(found((253, 0)).as_deref(), Some("dm/uuid LVM-AbCd"));
    let disk = |minor| found((8, minor));
    assert_eq!(disk(0).as_deref(), Some("device/wwid naa.5001"));
    assert_eq!(disk(3).as_deref(), Some("device/wwid naa.5001, partition 3"));
    assert_eq!(disk(16), None);
    assert_eq!(disk(17).as_deref(), Some("PARTUUID=ab-cd"));
    // A number that several disks have identifies none, nor their partitions.
    fake.device("pci/sdb", (8, 32), &[("device/wwid", "naa.5001")], &[]);
    fake.device("pci/sdb/sdb3", (8, 35), &[("partition", "3")], &[]);
    assert_eq!([0, 3, 32, 35].map(disk), [const { None }; 4]);
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
        let links = [("dev", format!("{}:{}", number.0, number.1)), ("class", node(&folder))];
        for (kind, name) in links {
            let all = self.root.path().join("sys").join(kind).join("block");
            fs::create_dir_all(&all).unwrap();
            symlink(&folder, all.join(name)).unwrap();
        }
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
