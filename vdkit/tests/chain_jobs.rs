//! Jobs that change two images, the chain, or all of an image's metadata: commit, rebase and amend.
//! The power fails, or an operation does, at each moment, on all files at once. The overlay's
//! content never changes, and repeating the job completes it.

mod support;

use std::sync::Arc;
use vdkit_block::StorageExt;

use support::disks::{SimDisk, Survival, power_cut, survivors};
use support::guest::{Guest, pattern};
use vdkit::jobs::{CommitOptions, commit_disks, take_over};
use vdkit::storage::MemoryStorage;
use vdkit::{
    AmendRequest, BackingRef, CreateRequest, Disk, FormatDriver, GuestOffset, HostOffset,
    ImageInfo, Limits, Monitor, NewSnapshot, OfflineImage, OpenOptions, OpenRequest, Options,
    Repair, Result, Secret, Storage,
};
use vdkit_testkit::{CrashClock, FaultKind, FaultPlan, Rng};

/// One image of a chain: format, options and disk size.
#[derive(Clone, Copy, Debug)]
struct Kind {
    format: &'static str,
    options: &'static str,
    bytes: u64,
    /// It has no backing image.
    bottom: bool,
    /// Takes snapshots between the writes. Those of version 2 do not record the disk size.
    snapshots: bool,
}

impl Kind {
    const fn with_snapshots(self) -> Self {
        Self { snapshots: true, ..self }
    }
}

const fn qcow2(options: &'static str, bytes: u64) -> Kind {
    Kind { format: "qcow2", options, bytes, bottom: false, snapshots: false }
}

const fn bottom(options: &'static str, bytes: u64) -> Kind {
    Kind { format: "qcow2", options, bytes, bottom: true, snapshots: false }
}

/// An encrypted image with a backing image.
const fn encrypted(bytes: u64) -> Kind {
    Kind { format: "qcow2", options: ENCRYPTED, bytes, bottom: false, snapshots: false }
}

const fn encrypted_bottom(bytes: u64) -> Kind {
    Kind { format: "qcow2", options: ENCRYPTED, bytes, bottom: true, snapshots: false }
}

const ENCRYPTED_V2: &str = "compat=0.10,cluster_size=512,encrypt.format=luks,encrypt.iter-time=0,encrypt.cipher-alg=aes-128";

const ENCRYPTED: &str =
    "cluster_size=4096,encrypt.format=luks,encrypt.iter-time=0,encrypt.cipher-alg=aes-128";

/// A raw LUKS container: unwritten space is noise.
const fn luks(bytes: u64) -> Kind {
    Kind {
        format: "luks",
        options: "iter-time=0,cipher-alg=aes-128",
        bytes,
        bottom: true,
        snapshots: false,
    }
}

const fn raw(bytes: u64) -> Kind {
    Kind { format: "raw", options: "", bytes, bottom: true, snapshots: false }
}

/// The key of the encrypted images.
fn key() -> Secret {
    Secret::new(b"a key of the tests".to_vec())
}

fn driver(kind: &Kind) -> &'static dyn FormatDriver {
    vdkit::format(kind.format).expect("a known format")
}

fn open_one(kind: &Kind, storage: Arc<dyn Storage>, writable: bool) -> Result<Disk> {
    let driver = driver(kind);
    let mut limits = Limits::default();
    limits.cache_bytes = 64 << 10;
    let info = driver.describe(&storage, &limits)?;
    let request = OpenRequest { storage, files: Vec::new(), writable, limits };
    let format = driver.open_with_keys(request, &[key()])?;
    Ok(Disk::from_format(format, info, &OpenOptions::default().writable(writable)))
}

/// Images on simulated disks, top first. Each is the overlay of the next, except bottoms.
struct Stack {
    kinds: Vec<Kind>,
    disks: Vec<SimDisk>,
}

impl Stack {
    /// Creates the images in memory, lowest first, writes to each, and moves them to recording
    /// disks.
    fn record(kinds: &[Kind], clock: &CrashClock, rng: &mut Rng) -> Self {
        let images = make(kinds, rng);
        let disk = |image| SimDisk::recording(image, clock);
        Self { kinds: kinds.to_vec(), disks: images.iter().map(disk).collect() }
    }

    fn on(&self, content: Vec<MemoryStorage>) -> Self {
        Self { kinds: self.kinds.clone(), disks: content.into_iter().map(SimDisk::new).collect() }
    }

    /// An image with its backing chain.
    fn open(&self, at: usize, writable: bool) -> Result<Disk> {
        let disk = self.open_alone(at, writable)?;
        if self.kinds[at].bottom { Ok(disk) } else { Ok(disk.over(self.open(at + 1, false)?)) }
    }

    fn open_alone(&self, at: usize, writable: bool) -> Result<Disk> {
        open_one(&self.kinds[at], self.disks[at].storage(), writable)
    }

    /// The content of the top image, followed by that of each of its snapshots.
    fn guest(&self) -> Guest {
        let guest = as_its_header_says(self);
        if self.kinds[0].snapshots {
            let top = self.open_alone(0, false).expect("opening");
            let all = top.top().snapshots().expect("qcow2 has snapshots");
            for info in all.list().expect("a sound list") {
                let view = all.view(&info.id).expect("a view");
                let about = ImageInfo::new("qcow2", view.guest_bytes());
                let view = Disk::from_format(view, about, &OpenOptions::default());
                let view = match self.kinds[0].bottom {
                    true => view,
                    false => view.over(self.open(1, false).expect("opening")),
                };
                let (bytes, end) = (guest_of(&view), guest.len());
                guest.0.set_len(end + bytes.len()).expect("memory");
                guest.0.write_at(&bytes.read(0, bytes.len()), HostOffset(end)).expect("memory");
            }
        }
        guest
    }

    /// The images must be consistent, except for leaks.
    fn audit(&self, what: &str) {
        for (kind, disk) in self.kinds.iter().zip(&self.disks) {
            if kind.format == "qcow2" && !is_dirty(disk) {
                let report = driver(kind)
                    .check(&OfflineImage::new(&disk.storage()), Repair::Nothing)
                    .expect("a check of a sound image");
                assert_eq!(report.corruptions, 0, "{what}: {kind:?}: {:#?}", report.findings);
            }
        }
    }

    fn commit(&self) -> Result<()> {
        let base = self.open(1, true)?;
        let top = self.open_alone(0, true)?;
        let mut options = CommitOptions::default();
        options.threads = Some(1);
        commit_disks(top, &base, true, &options, &Monitor::default()).map(|_| ())
    }
}

/// Rebases the top image from the second onto the third, or onto none.
fn rebase(stack: &Stack, onto: bool) -> Result<()> {
    let top = open_one(&stack.kinds[0], stack.disks[0].storage(), true)?;
    let named = top.layers()[0].info().backing_file.clone();
    let disk = match old_base(named.as_deref()) {
        Some(old) => top.over(stack.open(old, false)?),
        None => top,
    };
    let new = if onto { Some(stack.open(2, false)?) } else { None };
    let copied = take_over(&disk, new.as_ref(), Some(1), &Monitor::default());
    let closed = disk.close();
    copied.and(closed)?;
    drop(disk);
    let backing =
        onto.then(|| BackingRef::new("onto/another", Some(stack.kinds[2].format.to_owned())));
    driver(&stack.kinds[0]).amend(
        &AmendRequest {
            storage: stack.disks[0].storage(),
            files: Vec::new(),
            backing: Some(backing),
            options: Options::default(),
            limits: Limits::default(),
        },
        &Monitor::default(),
    )?;
    Ok(())
}

/// The image of the stack that a name in the top image's header refers to.
fn old_base(name: Option<&str>) -> Option<usize> {
    name.map(|name| if name == "onto/another" { 2 } else { 1 })
}

/// The content of the top image over the backing image in its header.
fn as_its_header_says(stack: &Stack) -> Guest {
    let top = stack.open_alone(0, false).expect("opening");
    let info = top.layers()[0].info().clone();
    let Some(base) = old_base(info.backing_file.as_deref()) else { return guest_of(&top) };
    assert_eq!(info.backing_format.as_deref(), Some(stack.kinds[base].format));
    guest_of(&top.over(stack.open(base, false).expect("opening")))
}

/// Refcounts of an image that is open with lazy refcounts may be stale.
fn is_dirty(disk: &SimDisk) -> bool {
    let mut version = [0; 4];
    let mut bits = [0; 8];
    disk.storage().read_padded(&mut version, HostOffset(4)).expect("memory");
    disk.storage().read_padded(&mut bits, HostOffset(72)).expect("memory");
    version[3] == 3 && bits[7] & 1 != 0
}

fn guest_of(disk: &Disk) -> Guest {
    let bytes = disk.guest_bytes();
    let mut guest = Guest(MemoryStorage::with_len("guest", bytes));
    let mut buf = vec![0; bytes as usize];
    disk.read_at(&mut buf, GuestOffset(0)).expect("a disk that can be read");
    guest.write(0, &buf);
    guest
}

fn make(kinds: &[Kind], rng: &mut Rng) -> Vec<MemoryStorage> {
    let mut images: Vec<Arc<MemoryStorage>> = Vec::new();
    for (depth, kind) in kinds.iter().enumerate().rev() {
        let image = Arc::new(MemoryStorage::with_len("image", 0));
        let storage: Arc<dyn Storage> = image.clone();
        let below = kinds.get(depth + 1).filter(|_| !kind.bottom);
        let backing = below
            .map(|below| BackingRef::new(format!("{}", depth + 1), Some(below.format.to_owned())));
        let driver = driver(kind);
        let mut options =
            Options::parse(kind.format, driver.options(), [kind.options]).expect("good options");
        options.set_key(driver.encrypts(&options).then(key));
        driver
            .create(&CreateRequest {
                storage: storage.clone(),
                files: Vec::new(),
                guest_bytes: kind.bytes,
                options,
                backing,
                backing_bytes: None,
            })
            .expect("creating");
        images.insert(0, image);
        let mut disk = open_one(kind, storage, true).expect("opening");
        if !disk.top().new_reads_zero() {
            disk.write_zeroes(GuestOffset(0), kind.bytes, false).expect("writing");
        }
        let chain = kinds[depth..].iter().take_while(|kind| !kind.bottom).count();
        for (i, below) in images.iter().enumerate().skip(1).take(chain) {
            let below: Arc<dyn Storage> = Arc::new(MemoryStorage::clone(below).read_only());
            disk = disk.over(open_one(&kinds[depth + i], below, false).expect("opening"));
        }
        for op in 0..8 {
            if kind.snapshots && op % 3 == 2 {
                let new = NewSnapshot { name: format!("before {op}"), ..NewSnapshot::default() };
                let all = disk.top().snapshots().expect("qcow2 has snapshots");
                all.create(&new, &Monitor::default()).expect("taking a snapshot");
            }
            let at = rng.below(kind.bytes / 512) * 512;
            let len = ((1 + rng.below(64)) * 512).min(kind.bytes - at);
            match rng.below(3) {
                0 => disk.write_zeroes(GuestOffset(at), len, rng.chance(1, 2)),
                _ => {
                    let bytes = pattern(op + 100 * depth as u64 + 1, at, len);
                    disk.write_at(&bytes, GuestOffset(at))
                }
            }
            .expect("writing");
        }
        disk.close().expect("closing");
        if kind.snapshots && kind.options.contains("compat=0.10") {
            forget_sizes(&images[0]);
        }
    }
    images.iter().map(|image| MemoryStorage::clone(image)).collect()
}

/// Shortens the snapshot entries to those before version 3.
fn forget_sizes(image: &MemoryStorage) {
    let read = |at: u64, bytes: usize| {
        let mut buf = vec![0; bytes];
        image.read_at(&mut buf, HostOffset(at)).expect("memory");
        buf
    };
    let number = |bytes: &[u8]| bytes.iter().fold(0, |n, &b| n << 8 | u64::from(b));
    let (count, table) = (number(&read(60, 4)), number(&read(64, 8)));
    let (mut at, mut short) = (table, Vec::new());
    for _ in 0..count {
        let mut fixed = read(at, 40);
        let (names, extra) =
            (number(&fixed[12..14]) + number(&fixed[14..16]), number(&fixed[36..]));
        fixed[36..].fill(0);
        short.extend_from_slice(&fixed);
        short.extend_from_slice(&read(at + 40 + extra, names as usize));
        short.resize(short.len().next_multiple_of(8), 0);
        at = (at + 40 + extra + names).next_multiple_of(8);
    }
    assert!(table + short.len() as u64 + 24 * count == at);
    image.write_at(&short, HostOffset(table)).expect("memory");
}

/// Overlay and base, and sometimes the base's backing image.
fn stacks() -> Vec<Vec<Kind>> {
    const M: u64 = 256 << 10;
    vec![
        vec![qcow2("cluster_size=4096", M), bottom("cluster_size=4096", M)],
        vec![qcow2("cluster_size=512", M), bottom("cluster_size=512", M / 2)],
        vec![qcow2("", M), raw(M / 2 + 1536)],
        vec![qcow2("extended_l2=on,cluster_size=16K", M), bottom("cluster_size=2M", 2 * M)],
        vec![qcow2("compat=0.10,cluster_size=4096", M), bottom("compat=0.10,cluster_size=1024", M)],
        vec![
            qcow2("lazy_refcounts=on,cluster_size=4096", M),
            qcow2("lazy_refcounts=on,extended_l2=on", M),
            bottom("cluster_size=4096", 3 * M),
        ],
        vec![encrypted(M), encrypted_bottom(M / 2)],
        vec![encrypted(M), luks(M)],
        // The base grows by noise.
        vec![qcow2("cluster_size=4096", M), luks(M / 2 + 512)],
        // The base grows over its backing image, without zero flags.
        vec![qcow2("cluster_size=4096", M), qcow2("compat=0.10,cluster_size=512", M / 2), raw(M)],
        vec![
            qcow2("cluster_size=4096", M),
            qcow2(ENCRYPTED_V2, M / 2 + 512),
            encrypted_bottom(2 * M),
        ],
    ]
}

/// An image, its backing image, and its new backing image.
fn families() -> Vec<Vec<Kind>> {
    const M: u64 = 256 << 10;
    vec![
        vec![qcow2("cluster_size=4096", M), bottom("", M), bottom("", M)],
        vec![qcow2("cluster_size=512", M), bottom("", M / 2), raw(2 * M)],
        vec![qcow2("extended_l2=on", M), raw(2 * M), bottom("extended_l2=on", M / 2 + 512)],
        vec![
            qcow2("compat=0.10,cluster_size=4096", M),
            bottom("compat=0.10", M / 2),
            bottom("cluster_size=2M", M),
        ],
        vec![qcow2("lazy_refcounts=on,cluster_size=4096", M), bottom("", M), raw(M)],
        vec![encrypted(M), luks(M / 2), encrypted_bottom(M)],
        vec![qcow2(ENCRYPTED_V2, M), luks(2 * M), encrypted_bottom(M)],
        vec![qcow2("extended_l2=on", M), encrypted_bottom(M), luks(2 * M)],
    ]
}

fn same(what: &str, found: &Guest, wanted: &Guest) {
    assert_eq!(found.len(), wanted.len(), "{what}: size");
    let (a, b) = (found.read(0, found.len()), wanted.read(0, wanted.len()));
    support::guest::assert_same(what, 0, &a, &b);
}

/// Moments, sampled if there are many.
fn moments(len: usize, most: usize, rng: &mut Rng) -> Vec<usize> {
    if len <= most {
        return (0..=len).collect();
    }
    (0..most).map(|_| rng.below(len as u64 + 1) as usize).collect()
}

/// Records a job; then the power fails at many moments. After each, the content is the same, the
/// images are consistent, and repeating `job` gives what `done` checks.
fn power_cuts(
    kinds: &[Kind],
    rng: &mut Rng,
    job: impl Fn(&Stack) -> Result<()>,
    done: impl Fn(&Stack, &Guest, &str),
) {
    let clock = CrashClock::new();
    let stack = Stack::record(kinds, &clock, rng);
    let guest = stack.guest();
    job(&stack).expect("a job on good images");
    done(&stack, &guest, "without a crash");
    for moment in moments(clock.now(), 60, rng) {
        let cuts = power_cut(&stack.disks, moment);
        for survival in Survival::SOME {
            let what = format!("{kinds:?}, {moment} of {}, {survival:?}", clock.now());
            let after = stack.on(survivors(&cuts, survival, rng));
            same(&what, &after.guest(), &guest);
            after.audit(&what);
            job(&after).unwrap_or_else(|error| panic!("{what}: run again: {error}"));
            done(&after, &guest, &what);
        }
    }
}

/// Fails each operation on each disk in turn. The content stays the same, and repeating `job` gives
/// what `done` checks.
fn faults(
    kinds: &[Kind],
    rng: &mut Rng,
    job: impl Fn(&Stack) -> Result<()>,
    done: impl Fn(&Stack, &Guest, &str),
) {
    let images = make(kinds, rng);
    let fresh = || Stack {
        kinds: kinds.to_vec(),
        disks: images.iter().map(|image| SimDisk::new(image.clone())).collect(),
    };
    let guest = fresh().guest();
    for number in 0..kinds.len() {
        for nth in 0.. {
            let stack = fresh();
            let what = format!("{kinds:?}, disk {number}, operation {nth}");
            stack.disks[number].faulty().arm(FaultPlan::nth(&FaultKind::ALL, nth).torn(1));
            let result = job(&stack);
            let fired = stack.disks[number].faulty().fired() > 0;
            stack.disks[number].faulty().heal();
            same(&what, &stack.guest(), &guest);
            stack.audit(&what);
            if result.is_err() {
                assert!(fired, "{what}: {result:?}");
                job(&stack).unwrap_or_else(|error| panic!("{what}: run again: {error}"));
            }
            done(&stack, &guest, &what);
            if !fired {
                break;
            }
        }
    }
}

/// The overlay and the base alone have the same content.
fn committed(stack: &Stack, guest: &Guest, what: &str) {
    same(what, &stack.guest(), guest);
    let base = guest_of(&stack.open(1, false).expect("opening"));
    assert!(base.len() >= guest.len(), "{what}: the base has {} bytes", base.len());
    let (a, b) = (base.read(0, guest.len()), guest.read(0, guest.len()));
    support::guest::assert_same(what, 0, &a, &b);
    let top = stack.open_alone(0, false).expect("opening");
    for run in top.extents(GuestOffset(0), guest.len()).expect("a map") {
        let run = run.expect("a map");
        assert!(matches!(run.place, vdkit::DiskPlace::Hole), "{what}: the overlay has {run:?}");
    }
    stack.audit(what);
}

/// The image has the same content on its new backing image.
fn rebased(onto: bool) -> impl Fn(&Stack, &Guest, &str) {
    move |stack, guest, what| {
        same(what, &stack.guest(), guest);
        let top = stack.open_alone(0, false).expect("opening");
        let named = top.layers()[0].info().backing_file.is_some();
        assert_eq!(named, onto, "{what}");
        stack.audit(what);
    }
}

#[test]
fn the_power_fails_during_a_commit() {
    support::for_seeds(2, |seed| {
        let mut rng = Rng::new(seed);
        for kinds in stacks() {
            power_cuts(&kinds, &mut rng, Stack::commit, committed);
        }
    });
}

#[test]
fn an_operation_fails_during_a_commit() {
    support::for_seeds(1, |seed| {
        let mut rng = Rng::new(seed);
        for kinds in stacks() {
            faults(&kinds, &mut rng, Stack::commit, committed);
        }
    });
}

/// An image that grows over a longer backing image. Version 2 has no zero flags, so zeroes must be
/// written first to hide it.
#[test]
fn an_image_that_grows_over_a_longer_one_never_shows_it() {
    const M: u64 = 256 << 10;
    let grow = |stack: &Stack| -> Result<()> {
        let disk = stack.open(0, true)?;
        let grown = disk.resize(M);
        let closed = disk.close();
        grown.and(closed)
    };
    let mut rng = Rng::new(1);
    for options in ["compat=0.10,cluster_size=512", "cluster_size=4096", ENCRYPTED_V2] {
        for before in [M / 2, M / 2 + 512, 512] {
            let kinds = [qcow2(options, before), raw(2 * M)];
            let images = make(&kinds, &mut rng);
            let on = |images: &[MemoryStorage]| Stack {
                kinds: kinds.to_vec(),
                disks: images.iter().map(|image| SimDisk::new(image.clone())).collect(),
            };
            let mut wanted = on(&images).guest();
            wanted.resize(M);
            // The old or new size, and zeroes beyond the old end.
            let whole = |stack: &Stack, what: &str| {
                let mut found = stack.guest();
                assert!([before, M].contains(&found.len()), "{what}: {}", found.len());
                found.resize(M);
                same(what, &found, &wanted);
                stack.audit(what);
            };
            let clock = CrashClock::new();
            let recorded = Stack {
                kinds: kinds.to_vec(),
                disks: images.iter().map(|image| SimDisk::recording(image, &clock)).collect(),
            };
            grow(&recorded).expect("growing");
            for moment in moments(clock.now(), 40, &mut rng) {
                let cuts = power_cut(&recorded.disks, moment);
                for survival in [Survival::Nothing, Survival::Everything, Survival::Lot] {
                    let what = format!("{options}, {before}, {moment}, {survival:?}");
                    let after = recorded.on(survivors(&cuts, survival, &mut rng));
                    whole(&after, &what);
                    grow(&after).expect("growing once more");
                    whole(&after, &what);
                }
            }
            for nth in 0.. {
                let stack = on(&images);
                let what = format!("{options}, {before}, operation {nth} and later ones fail");
                let plan = FaultPlan::nth(&FaultKind::ALL, nth).lasting();
                stack.disks[0].faulty().arm(plan);
                let grown = grow(&stack);
                stack.disks[0].faulty().heal();
                whole(&stack, &what);
                if grown.is_ok() {
                    break;
                }
                grow(&stack).unwrap_or_else(|error| panic!("{what}: run again: {error}"));
                whole(&stack, &what);
            }
        }
    }
}

/// A power cut between the base's last sync and the emptying is the critical one: the bytes that
/// the overlay drops must be durable in the base. Here the base loses everything unsynced.
#[test]
fn nothing_is_given_up_before_it_is_durable_beneath() {
    let kinds = [qcow2("cluster_size=4096", 64 << 10), bottom("cluster_size=4096", 64 << 10)];
    let clock = CrashClock::new();
    let stack = Stack::record(&kinds, &clock, &mut Rng::new(1));
    let guest = stack.guest();
    stack.commit().expect("a commit");
    for moment in 0..=clock.now() {
        let cuts = power_cut(&stack.disks, moment);
        let worst = vec![cuts[0].everything(), cuts[1].only_durable()];
        same(&format!("moment {moment}"), &stack.on(worst).guest(), &guest);
    }
}

#[test]
fn the_power_fails_during_a_rebase() {
    support::for_seeds(2, |seed| {
        let mut rng = Rng::new(seed);
        for kinds in families() {
            for onto in [true, false] {
                power_cuts(&kinds, &mut rng, |stack| rebase(stack, onto), rebased(onto));
            }
        }
    });
}

#[test]
fn an_operation_fails_during_a_rebase() {
    support::for_seeds(1, |seed| {
        let mut rng = Rng::new(seed);
        for kinds in families() {
            for onto in [true, false] {
                faults(&kinds, &mut rng, |stack| rebase(stack, onto), rebased(onto));
            }
        }
    });
}

fn amend(stack: &Stack, options: &str) -> Result<()> {
    let driver = driver(&stack.kinds[0]);
    driver.amend(
        &AmendRequest {
            storage: stack.disks[0].storage(),
            files: Vec::new(),
            backing: None,
            options: Options::parse("qcow2", driver.options(), [options]).expect("good options"),
            limits: Limits::default(),
        },
        &Monitor::default(),
    )?;
    Ok(())
}

/// Images and amendments.
fn amendments() -> Vec<(Vec<Kind>, &'static str)> {
    const M: u64 = 256 << 10;
    vec![
        (vec![bottom("cluster_size=4096", M)], "compat=0.10"),
        (vec![qcow2("cluster_size=4096", M), bottom("", M)], "compat=0.10"),
        (vec![qcow2("lazy_refcounts=on,cluster_size=512", M), raw(M)], "compat=0.10"),
        (vec![qcow2("compat=0.10,cluster_size=512", M), raw(M)], "compat=1.1,refcount_bits=32"),
        (vec![bottom("cluster_size=4096", M).with_snapshots()], "compat=0.10"),
        (vec![qcow2("cluster_size=512", M).with_snapshots(), bottom("", M)], "compat=0.10"),
        (vec![qcow2("compat=0.10", M).with_snapshots(), raw(M)], "compat=1.1,refcount_bits=32"),
        (vec![bottom("cluster_size=512", M)], "refcount_bits=1"),
        (vec![bottom("cluster_size=4096", M)], "refcount_bits=64,lazy_refcounts=on"),
        (vec![bottom("refcount_bits=1,extended_l2=on", M)], "refcount_bits=16"),
        (vec![bottom("refcount_bits=8", M)], "refcount_bits=16,compat=0.10"),
        (vec![encrypted(M), luks(M)], "refcount_bits=1,lazy_refcounts=on"),
    ]
}

/// The same content, and nothing left to amend.
fn amended(options: &str) -> impl Fn(&Stack, &Guest, &str) {
    move |stack, guest, what| {
        same(what, &stack.guest(), guest);
        stack.audit(what);
        let before = stack.disks[0].counting().counts();
        amend(stack, options).expect("nothing to do");
        let after = stack.disks[0].counting().counts();
        assert_eq!(before.writes, after.writes, "{what}: {options} is not done");
        let disk = stack.open(0, true).expect("opening for writing");
        disk.write_at(&[7; 4096], GuestOffset(512)).expect("writing on");
        disk.close().expect("closing");
        stack.audit(what);
    }
}

#[test]
fn the_power_fails_during_an_amendment() {
    support::for_seeds(2, |seed| {
        let mut rng = Rng::new(seed);
        for (kinds, options) in amendments() {
            power_cuts(
                &kinds,
                &mut rng,
                |stack| amend(stack, options),
                |stack, guest, what| {
                    if what != "without a crash" {
                        amended(options)(stack, guest, what);
                    }
                },
            );
        }
    });
}

#[test]
fn an_operation_fails_during_an_amendment() {
    support::for_seeds(1, |seed| {
        let mut rng = Rng::new(seed);
        for (kinds, options) in amendments() {
            faults(&kinds, &mut rng, |stack| amend(stack, options), amended(options));
        }
    });
}
