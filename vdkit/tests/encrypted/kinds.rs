//! The kinds of encrypted images, made in a folder.

use std::path::PathBuf;

use tempfile::TempDir;
use vdkit::jobs::{self, CreateOptions, NewBacking};
use vdkit::{Disk, GuestOffset, Monitor, OpenOptions, Options, Repair, Secret};

/// Bytes of a new disk.
pub const BYTES: u64 = (1 << 20) + 3 * 512;

/// Properties of an image.
pub struct Kind {
    pub name: &'static str,
    pub format: &'static str,
    pub options: &'static str,
    /// Options of the backing image, which has the same key; or raw.
    pub base: Option<&'static str>,
}

pub const KINDS: &[Kind] = &[
    Kind { name: "luks", format: "luks", options: "", base: None },
    Kind {
        name: "luks-cbc",
        format: "luks",
        options: "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv,hash-alg=sha1",
        base: None,
    },
    Kind { name: "qcow2", format: "qcow2", options: "", base: None },
    Kind {
        name: "qcow2-small",
        format: "qcow2",
        options: "cluster_size=512,encrypt.cipher-alg=aes-256,encrypt.cipher-mode=cbc,\
                  encrypt.ivgen-alg=plain64",
        base: None,
    },
    Kind { name: "qcow2-4k", format: "qcow2", options: "cluster_size=4K", base: Some("raw") },
    Kind {
        name: "qcow2-extended",
        format: "qcow2",
        options: "cluster_size=16K,extended_l2=on",
        base: Some("encrypt.format=luks,encrypt.iter-time=0,cluster_size=8K"),
    },
    Kind {
        name: "qcow2-preallocated",
        format: "qcow2",
        options: "cluster_size=16K,preallocation=metadata",
        base: None,
    },
    Kind {
        name: "qcow2-extended-preallocated",
        format: "qcow2",
        options: "extended_l2=on,preallocation=falloc",
        base: None,
    },
    Kind { name: "qcow2-v2", format: "qcow2", options: "compat=0.10,cluster_size=4K", base: None },
    Kind {
        name: "qcow2-data-file",
        format: "qcow2",
        options: "cluster_size=4K,data_file=data",
        base: None,
    },
];

/// An image in its folder.
pub struct Image {
    pub dir: TempDir,
    pub kind: &'static Kind,
}

pub fn key() -> Secret {
    Secret::new(b"a key of the tests".to_vec())
}

fn make(path: PathBuf, format: &str, options: &str, base: Option<NewBacking>) {
    let driver = vdkit::format(format).unwrap();
    let mut options = Options::parse(format, driver.options(), [options]).unwrap();
    if driver.encrypts(&options) {
        options.set_key(Some(key()));
    }
    let create =
        CreateOptions::new(&path, driver).guest_bytes(BYTES).options(options).backing(base);
    jobs::create(&vdkit::registry(), &create, &Monitor::default()).unwrap();
}

impl Image {
    pub fn make(kind: &'static Kind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), key().bytes()).unwrap();
        let base = kind.base.map(|options| {
            let (name, format) =
                ("base".to_owned(), if options == "raw" { "raw" } else { "qcow2" });
            let options = if options == "raw" { "" } else { options };
            make(dir.path().join(&name), format, options, None);
            let opening = OpenOptions::read_write().format(format).keys(vec![key()]);
            let disk = Disk::open(&vdkit::registry(), dir.path().join(&name), &opening).unwrap();
            let content: Vec<u8> = (0..400_000u32).map(|i| (i / 7) as u8 | 1).collect();
            disk.write_at(&content, GuestOffset(100_000)).unwrap();
            disk.close().unwrap();
            NewBacking::new(name, Some(format.to_owned()))
        });
        let prefix = if kind.format == "luks" {
            "iter-time=0"
        } else {
            "encrypt.format=luks,encrypt.iter-time=0"
        };
        make(dir.path().join("image"), kind.format, &format!("{prefix},{}", kind.options), base);
        Self { dir, kind }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    pub fn open(&self, writable: bool) -> Disk {
        let options = OpenOptions::default().writable(writable).keys(vec![key()]);
        Disk::open(&vdkit::registry(), self.path(), &options).unwrap()
    }

    /// Our check finds nothing.
    pub fn check(&self) {
        let checked = jobs::check(
            &vdkit::registry(),
            self.path(),
            &OpenOptions::read_only(),
            Repair::Nothing,
            &Monitor::default(),
        );
        let report = checked.unwrap().report;
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{}: {report:?}", self.kind.name);
    }
}
