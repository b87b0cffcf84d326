//! Shapes of test images: options, and how QEMU makes the image.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use vdkit_block::{
    BackingRef, CreateRequest, Creation, FormatDriver, HostOffset, Options, Secret, Storage,
};
use vdkit_qcow2::Qcow2Driver;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::Rng;
use vdkit_testkit::save_sparse;

use super::disks::load;
use super::guest::{Guest, pattern};
use super::qemu;

/// The key of encrypted images.
pub const KEY: &[u8] = b"a key of the tests";

/// Ciphers of encrypted images. Key derivation is as fast as possible, since images are opened
/// thousands of times.
pub const XTS: Option<&str> = Some("encrypt.cipher-alg=aes-128");
pub const CBC: Option<&str> =
    Some("encrypt.cipher-alg=aes-256,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv");

/// The backing image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Base {
    None,
    Shorter,
    Equal,
    Longer,
}

/// Location of guest data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataFile {
    Inside,
    Outside,
    OutsideRaw,
}

/// Initial content of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Content {
    Empty,
    /// Written by qemu-io: data, zero clusters, compressed clusters, discarded ones.
    Filled,
    /// The same, with two internal snapshots between the writes.
    Snapshots,
}

/// One kind of image.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub version: u32,
    pub cluster: u64,
    pub refcount_bits: u32,
    pub extended: bool,
    pub base: Base,
    pub base_qcow2: bool,
    pub data_file: DataFile,
    pub lazy: bool,
    pub preallocation: &'static str,
    pub zstd: bool,
    pub content: Content,
    pub bitmap: bool,
    /// The disk is large and only two small windows of it are used, on both sides of the border
    /// between two L2 tables.
    pub wide: bool,
    /// LUKS, with these options.
    pub encryption: Option<&'static str>,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            version: 3,
            cluster: 64 << 10,
            refcount_bits: 16,
            extended: false,
            base: Base::None,
            base_qcow2: false,
            data_file: DataFile::Inside,
            lazy: false,
            preallocation: "off",
            zstd: false,
            content: Content::Empty,
            bitmap: false,
            wide: false,
            encryption: None,
        }
    }
}

fn one_in(rng: &mut Rng, n: u64) -> bool {
    rng.chance(1, n)
}

fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.below(from.len() as u64) as usize]
}

/// An image ready to be opened.
#[derive(Debug)]
pub struct Prepared {
    pub image: MemoryStorage,
    pub data: Option<MemoryStorage>,
    pub base: Option<MemoryStorage>,
    pub guest: Guest,
}

impl Shape {
    /// The shapes of each proof: every option alone, and pairs that interact in the code.
    pub fn all() -> Vec<Self> {
        let base = Self::default();
        let mut shapes = vec![base.clone()];
        for version in [2, 3] {
            for cluster in [512, 4096, 65536, 2 << 20] {
                for content in [Content::Empty, Content::Filled, Content::Snapshots] {
                    shapes.push(Self { version, cluster, content, ..base.clone() });
                }
            }
            for (b, base_qcow2) in
                [(Base::Shorter, false), (Base::Equal, true), (Base::Longer, true)]
            {
                for (cluster, content) in [(4096, Content::Filled), (65536, Content::Snapshots)] {
                    let base = base.clone();
                    shapes.push(Self { version, cluster, base: b, base_qcow2, content, ..base });
                }
            }
        }
        for refcount_bits in [1, 8, 64] {
            for cluster in [512, 65536] {
                let content = if refcount_bits > 1 { Content::Snapshots } else { Content::Filled };
                shapes.push(Self { refcount_bits, cluster, content, ..base.clone() });
            }
        }
        for cluster in [16384, 65536] {
            for content in [Content::Empty, Content::Filled, Content::Snapshots] {
                for b in [Base::None, Base::Shorter, Base::Longer] {
                    let base = base.clone();
                    shapes.push(Self { extended: true, cluster, content, base: b, ..base });
                }
            }
        }
        for data_file in [DataFile::Outside, DataFile::OutsideRaw] {
            for cluster in [4096, 65536] {
                for (extended, lazy) in [(false, false), (true, false), (false, true)] {
                    if extended && cluster < 16384 {
                        continue;
                    }
                    let content = if lazy { Content::Filled } else { Content::Empty };
                    let base = base.clone();
                    shapes.push(Self { data_file, cluster, extended, lazy, content, ..base });
                }
            }
        }
        shapes.push(Self {
            data_file: DataFile::Outside,
            base: Base::Equal,
            content: Content::Filled,
            ..base.clone()
        });
        for preallocation in ["metadata", "falloc", "full"] {
            for (cluster, extended) in [(4096, false), (65536, false), (65536, true)] {
                shapes.push(Self { preallocation, cluster, extended, ..base.clone() });
            }
        }
        for zstd in [false, true] {
            shapes.push(Self { zstd, content: Content::Filled, ..base.clone() });
            shapes.push(Self { zstd, cluster: 4096, content: Content::Snapshots, ..base.clone() });
        }
        for lazy in [false, true] {
            shapes.push(Self { lazy, cluster: 4096, content: Content::Filled, ..base.clone() });
            shapes.push(Self { lazy, bitmap: true, content: Content::Filled, ..base.clone() });
        }
        for (cluster, extended) in [(4096, false), (65536, false), (65536, true)] {
            shapes.push(Self { cluster, extended, wide: true, ..base.clone() });
        }
        shapes.extend(Self::encrypted());
        shapes
    }

    /// Encrypted images of each kind with other data paths.
    pub fn encrypted() -> Vec<Self> {
        let xts = Self { encryption: XTS, ..Self::default() };
        let cbc = Self { encryption: CBC, cluster: 4096, ..Self::default() };
        let (filled, snapshots) = (Content::Filled, Content::Snapshots);
        vec![
            Self { cluster: 512, refcount_bits: 64, ..xts.clone() },
            Self { cluster: 4096, content: snapshots, ..xts.clone() },
            Self { content: filled, bitmap: true, ..xts.clone() },
            Self { content: snapshots, base: Base::Longer, base_qcow2: true, ..xts.clone() },
            Self { preallocation: "metadata", ..xts.clone() },
            Self { extended: true, preallocation: "full", ..xts.clone() },
            Self { content: filled, base: Base::Shorter, lazy: true, ..cbc.clone() },
            Self { version: 2, content: filled, base: Base::Longer, ..cbc.clone() },
            Self { data_file: DataFile::Outside, content: filled, ..cbc.clone() },
            Self { data_file: DataFile::Outside, base: Base::Longer, ..cbc.clone() },
            Self {
                extended: true,
                cluster: 16384,
                content: snapshots,
                base: Base::Shorter,
                ..cbc.clone()
            },
        ]
    }

    /// A shape with random options.
    pub fn random(rng: &mut Rng) -> Self {
        let extended = one_in(rng, 4);
        let version = if extended { 3 } else { pick(rng, &[2, 3, 3, 3]) };
        let cluster = if extended {
            pick(rng, &[16384, 65536])
        } else {
            pick(rng, &[512, 1024, 4096, 65536])
        };
        let data_file = match rng.below(6) {
            0 if version == 3 => DataFile::Outside,
            1 if version == 3 => DataFile::OutsideRaw,
            _ => DataFile::Inside,
        };
        let base = if data_file == DataFile::OutsideRaw || !one_in(rng, 2) {
            Base::None
        } else {
            pick(rng, &[Base::Shorter, Base::Equal, Base::Longer])
        };
        let inside = data_file == DataFile::Inside;
        let content = match rng.below(3) {
            0 => Content::Empty,
            1 if inside => Content::Snapshots,
            _ => Content::Filled,
        };
        let snapshots = content == Content::Snapshots;
        let refcount_bits = match version {
            2 => 16,
            _ if snapshots => pick(rng, &[8, 16, 32, 64]),
            _ => pick(rng, &[1, 2, 4, 8, 16, 64]),
        };
        let mut shape = Self {
            version,
            cluster,
            refcount_bits,
            extended,
            base,
            base_qcow2: one_in(rng, 2),
            data_file,
            lazy: version == 3 && one_in(rng, 4),
            preallocation: if base == Base::None && content == Content::Empty && inside {
                pick(rng, &["off", "off", "metadata", "falloc", "full"])
            } else {
                "off"
            },
            zstd: version == 3 && one_in(rng, 2),
            content,
            bitmap: version == 3 && one_in(rng, 8),
            wide: cluster == 4096 && base == Base::None && one_in(rng, 4),
            encryption: None,
        };
        // (Drawn last, so that earlier seeds keep their meaning.)
        let possible =
            data_file != DataFile::OutsideRaw && (version == 3 || shape.preallocation == "off");
        if possible && one_in(rng, 4) {
            shape.encryption = pick(rng, &[XTS, CBC]);
        }
        shape
    }

    /// Guest bytes that one L2 table maps.
    pub fn span(&self) -> u64 {
        self.cluster / if self.extended { 16 } else { 8 } * self.cluster
    }

    /// Bytes of the guest disk; never a multiple of the cluster size.
    pub fn guest_bytes(&self) -> u64 {
        if self.wide {
            return self.span() + 8 * self.cluster + 512;
        }
        match self.cluster {
            512 | 1024 => (200 << 10) + 512,
            4096 => (1 << 20) + 1536,
            16384 => (2 << 20) + 1536,
            65536 => (3 << 20) + 2560,
            _ => (10 << 20) + 512,
        }
    }

    /// The parts of a disk that the test uses.
    pub fn windows(&self, guest_bytes: u64) -> Vec<Range<u64>> {
        if !self.wide {
            return std::iter::once(0..guest_bytes).collect();
        }
        let (span, part) = (self.span(), 8 * self.cluster);
        let windows = [0..part, span - part..span + part + 4 * self.cluster];
        let cut = |w: Range<u64>| w.start.min(guest_bytes)..w.end.min(guest_bytes);
        windows.into_iter().map(cut).filter(|w| !w.is_empty()).collect()
    }

    /// Bytes of the backing disk.
    pub fn base_bytes(&self) -> u64 {
        let unit = self.cluster.max(4096);
        let whole = self.guest_bytes() / unit;
        match self.base {
            Base::None => 0,
            Base::Shorter => whole / 2 * unit + 512,
            Base::Equal => self.guest_bytes(),
            Base::Longer => (whole + 4) * unit + 1024,
        }
    }

    /// Whether compressed clusters can be written.
    pub fn packs(&self) -> bool {
        self.data_file == DataFile::Inside && self.encryption.is_none()
    }

    /// Its keys.
    pub fn keys(&self) -> Vec<Secret> {
        self.encryption.map(|_| Secret::new(KEY.to_vec())).into_iter().collect()
    }

    fn options(&self) -> String {
        let mut options = vec![
            format!("compat={}", if self.version == 2 { "0.10" } else { "1.1" }),
            format!("cluster_size={}", self.cluster),
            format!("preallocation={}", self.preallocation),
        ];
        if self.version == 3 {
            options.push(format!("refcount_bits={}", self.refcount_bits));
            let on = |flag| if flag { "on" } else { "off" };
            options.push(format!("extended_l2={}", on(self.extended)));
            options.push(format!("lazy_refcounts={}", on(self.lazy)));
            options.push(format!("compression_type={}", if self.zstd { "zstd" } else { "zlib" }));
        }
        match self.data_file {
            DataFile::Inside => {}
            DataFile::Outside => options.push("data_file=data.raw".into()),
            DataFile::OutsideRaw => options.push("data_file=data.raw,data_file_raw=on".into()),
        }
        if let Some(cipher) = self.encryption {
            options.push(format!("encrypt.format=luks,encrypt.iter-time=0,{cipher}"));
        }
        options.join(",")
    }

    /// Makes such an image with QEMU's programs, once per test process. (For an encrypted image
    /// QEMU would benchmark the key derivation for seconds: it only fills those.)
    pub fn prepare(&self) -> Arc<Prepared> {
        static MADE: LazyLock<Mutex<HashMap<Shape, Arc<Prepared>>>> = LazyLock::new(Mutex::default);
        if let Some(made) = MADE.lock().get(self) {
            return made.clone();
        }
        let made = Arc::new(self.make());
        MADE.lock().entry(self.clone()).or_insert(made).clone()
    }

    fn make(&self) -> Prepared {
        let scratch = qemu::scratch();
        let dir = scratch.path();
        let base = (self.base != Base::None).then(|| self.make_base(dir));
        let encrypted = self.encryption.is_some();
        if encrypted {
            self.create_encrypted(dir);
        } else {
            self.create(dir);
        }
        if self.content != Content::Empty {
            self.fill(dir, 0);
        }
        if self.content == Content::Snapshots {
            qemu::on_image(dir, encrypted, &["snapshot", "-c", "first"], &[]);
            self.fill(dir, 1);
            qemu::on_image(dir, encrypted, &["snapshot", "-c", "second"], &[]);
        }
        if self.bitmap {
            qemu::on_image(dir, encrypted, &["bitmap", "--add"], &["dirt"]);
            // Its table is resized with the disk.
            qemu::on_image(dir, encrypted, &["bitmap", "--add", "-g", "512"], &["fine"]);
        }
        let guest = Guest(qemu::guest_view(dir, encrypted));
        assert_eq!(guest.len(), self.guest_bytes());
        let load = |name: &str| load(&dir.join(name));
        Prepared {
            image: load("image.qcow2"),
            data: (self.data_file != DataFile::Inside).then(|| load("data.raw")),
            base,
            guest,
        }
    }

    fn create(&self, dir: &Path) {
        let (options, size) = (self.options(), self.guest_bytes().to_string());
        let mut args = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if self.base != Base::None {
            args.extend(["-b", self.base_name(), "-F", self.base_format()]);
        }
        args.extend(["image.qcow2", &size]);
        qemu::img(dir, &args);
    }

    fn create_encrypted(&self, dir: &Path) {
        let new = |name: &str| Arc::new(MemoryStorage::with_len(name, 0));
        let (image, data) = (new("image.qcow2"), new("data.raw"));
        let outside = self.data_file != DataFile::Inside;
        let specs = Qcow2Driver.options();
        let mut options = Options::parse("qcow2", specs, [&*self.options()]).expect("good options");
        options.set_key(self.keys().pop());
        let request = CreateRequest {
            storage: image.clone(),
            files: outside.then(|| data.clone() as Arc<dyn Storage>).into_iter().collect(),
            guest_bytes: self.guest_bytes(),
            options,
            backing: (self.base != Base::None)
                .then(|| BackingRef::new(self.base_name(), Some(self.base_format().to_owned()))),
            backing_bytes: None,
        };
        Qcow2Driver.create(&request).expect("creating");
        save_sparse(&*image, &dir.join("image.qcow2"));
        if outside {
            save_sparse(&*data, &dir.join("data.raw"));
        }
        std::fs::write(dir.join("key"), KEY).expect("a scratch file");
    }

    pub fn base_name(&self) -> &'static str {
        if self.base_qcow2 { "base.qcow2" } else { "base.raw" }
    }

    pub fn base_format(&self) -> &'static str {
        if self.base_qcow2 { "qcow2" } else { "raw" }
    }

    fn make_base(&self, dir: &Path) -> MemoryStorage {
        let bytes = self.base_bytes();
        let base = MemoryStorage::with_len("base.raw", bytes);
        let step = self.cluster.max(4096);
        for at in (0..bytes).step_by(step as usize) {
            // Some of it is zero.
            if at / step % 5 != 3 {
                let bytes = pattern(0x1_000, at, step.min(bytes - at));
                base.write_at(&bytes, HostOffset(at)).expect("memory");
            }
        }
        save_sparse(&base, &dir.join("base.raw"));
        if !self.base_qcow2 {
            return base;
        }
        qemu::img(dir, &["convert", "-f", "raw", "-O", "qcow2", "-c", "base.raw", "base.qcow2"]);
        load(&dir.join("base.qcow2"))
    }

    /// Writes everything that qemu-io supports.
    fn fill(&self, dir: &Path, round: u64) {
        let (cluster, all) = (self.cluster, self.guest_bytes() / self.cluster);
        let at = |k: u64| (k * 7 + round * 3) % all.max(1) * cluster;
        let mut commands = Vec::new();
        for k in 0..12 {
            let value = 0x10 + k + 0x20 * round;
            commands.push(match k {
                0..=2 if self.packs() => format!("write -c -P {value:#x} {} {cluster}", at(k + 4)),
                0..=6 => format!("write -P {value:#x} {} {cluster}", at(k)),
                7 => format!("write -P {value:#x} {} {}", at(k) + 512 * round, cluster.min(1024)),
                8 => format!("write -z {} {cluster}", at(k)),
                9 => format!("write -z -u {} {cluster}", at(k)),
                10 => format!("discard {} {cluster}", at(1)),
                _ => format!("write -z {} {cluster}", at(4)),
            });
        }
        qemu::io(dir, self.encryption.is_some(), &commands);
    }
}
