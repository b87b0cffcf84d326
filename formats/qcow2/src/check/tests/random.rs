//! Random metadata damage: no panic, bounded work, and a repair that either ends clean for vdkit
//! and qemu-img or reports what it could not fix.

use std::sync::Arc;

use vdkit_block::{HostOffset, Limits, Monitor, Repair, Result, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CountingStorage, Rng, qemu};

use super::support::{Image, KINDS, guest_view, peers, qemu_check, verdict_of};
use crate::check;
use crate::check::image::Image as Parsed;
use crate::check::survey::{Mode, Survey};

/// Host offsets of metadata; offsets of used entries are more frequent.
fn targets(storage: &Arc<dyn Storage>) -> Vec<u64> {
    let image = Parsed::open(storage, &Limits::default()).unwrap();
    let survey = Survey::take(&image, Mode::Compare, &Monitor::default()).unwrap();
    // Excludes the header length and extensions, where QEMU is stricter, and encryption, where QEMU
    // asks for a password.
    let fields_end = if image.header.version < 3 { 72 } else { 96 };
    let mut targets: Vec<u64> = (24..32).chain(40..fields_end).collect();
    let mut table = |offset: u64, bytes: u64| {
        let mut content = vec![0; bytes as usize];
        storage.read_padded(&mut content, HostOffset(offset)).unwrap();
        for (i, byte) in content.iter().enumerate() {
            if *byte != 0 || i % 97 == 0 {
                targets.push(offset + i as u64);
            }
        }
    };
    let cluster = image.cluster_bytes();
    let header = &image.header;
    table(header.l1_offset.0, u64::from(header.l1_entries) * 8);
    table(header.refcount_table_offset.0, cluster);
    for &block in survey.refcounts.blocks.iter().filter(|&&block| block != 0) {
        table(block, cluster);
    }
    for l2 in survey.tables.iter().take(20) {
        table(l2.offset, cluster);
    }
    if header.snapshot_count > 0 {
        table(header.snapshots_offset.0, 200);
        for snapshot in &survey.snapshots.snapshots {
            let (offset, bytes) = snapshot.l1();
            table(offset, bytes);
        }
    }
    if let Some(bitmaps) = header.bitmaps() {
        let (at, bytes) = (bitmaps.directory_offset.0, bitmaps.directory_bytes);
        table(at, bytes);
        // Without the flags of its entries, of 32 bytes each: QEMU refuses the one for extra data.
        targets.retain(|target| !(at..at + bytes).contains(target) || (target - at) % 32 != 15);
    }
    targets
}

fn damage(storage: &dyn Storage, targets: &[u64], rng: &mut Rng) {
    let pick = |rng: &mut Rng| targets[rng.below(targets.len() as u64) as usize];
    for _ in 0..1 + rng.below(6) {
        let at = pick(rng);
        let mut word = [0; 8];
        match rng.below(6) {
            0..=2 => {
                storage.read_padded(&mut word[..1], HostOffset(at)).unwrap();
                word[0] ^= 1 << rng.below(8);
                storage.write_at(&word[..1], HostOffset(at)).unwrap();
            }
            3 => {
                // Copies an entry of one table to another, which gives clusters two owners.
                storage.read_padded(&mut word, HostOffset(pick(rng) & !7)).unwrap();
                storage.write_at(&word, HostOffset(at & !7)).unwrap();
            }
            4 => {
                rng.fill(&mut word);
                storage.write_at(&word, HostOffset(at & !7)).unwrap();
            }
            _ if rng.chance(1, 4) => {
                let len = storage.len().unwrap();
                storage.set_len(len - rng.below(len / 8)).unwrap();
            }
            _ => storage.write_at(&word, HostOffset(at & !7)).unwrap(),
        }
    }
}

fn run(storage: &Arc<dyn Storage>, repair: Repair) -> Result<vdkit_block::CheckReport> {
    let mut limits = Limits::default();
    limits.check_bytes_max = 64 << 20;
    check::check(storage, None, repair, &limits, &Monitor::default())
}

fn one(image: &Image, targets: &[u64], sound: &[u8], seed: u64) {
    let memory = Arc::new(MemoryStorage::from_bytes("image", sound));
    damage(&*memory, targets, &mut Rng::new(seed));
    let counting = CountingStorage::new(Arc::clone(&memory) as Arc<dyn Storage>);
    let storage: Arc<dyn Storage> = Arc::clone(&counting) as Arc<dyn Storage>;

    let found = run(&storage, Repair::Nothing);
    assert!(counting.counts().bytes_read < 256 << 20, "seed {seed}");
    std::fs::write(&image.path, memory.to_vec()).unwrap();
    let theirs = qemu_check(&image.path).exit;
    let Ok(report) = found else {
        // vdkit may refuse an image that qemu-img accepts.
        return;
    };
    let ours = verdict_of(&report).exit;
    assert!(
        ours == theirs || ours == 2 || (theirs == 1 && ours != 0),
        "seed {seed}: {ours} against {theirs}: {:#?}",
        report.findings
    );
    let before = guest_view(&*storage);
    // Apparent lost tables are freed only with force.
    let repaired = run(&storage, Repair::All).or_else(|_| run(&storage, Repair::AllForced));
    let Ok(report) = repaired else { return };
    let after = guest_view(&*storage);
    let worse = before.iter().zip(&after).position(|(before, after)| {
        // A lost cluster may become zeroes.
        before.is_some() && before != after && *after != Some(0)
    });
    assert_eq!(worse, None, "seed {seed}: {:#?}", report.findings);
    if report.corruptions_left() > 0 || report.leaks_left() > 0 {
        assert!(report.findings.iter().any(|finding| !finding.repaired), "seed {seed}");
        return;
    }
    let again = run(&storage, Repair::Nothing).unwrap();
    assert_eq!((again.corruptions, again.leaks), (0, 0), "seed {seed}: {:#?}", again.findings);
    std::fs::write(&image.path, memory.to_vec()).unwrap();
    let theirs = qemu_check(&image.path);
    assert!(
        theirs.exit == 0,
        "seed {seed}: {theirs:?}: {} {:#?}",
        qemu::check(&image.path, "qcow2", None).text,
        report.findings
    );
}

#[test]
fn random_damage_is_survived() {
    if !peers() {
        return;
    }
    let runs = std::env::var("VDKIT_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(8);
    let mut rng = Rng::from_env(7);
    for kind in KINDS {
        let image = Image::make(kind);
        let sound = std::fs::read(&image.path).unwrap();
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", &sound));
        let targets = targets(&storage);
        for _ in 0..runs {
            let seed = rng.next_u64();
            println!("{} seed {seed:#x}", kind.name);
            if std::env::var("ONLY").is_ok_and(|s| s != seed.to_string()) {
                continue;
            }
            one(&image, &targets, &sound, seed);
        }
    }
}
