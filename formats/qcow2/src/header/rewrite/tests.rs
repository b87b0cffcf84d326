use std::sync::Arc;

use vdkit_block::bytes::{be32, be64};
use vdkit_block::{
    BackingRef, CreateRequest, Creation, HostOffset, Limits, Options, Storage, StorageExt,
};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CrashStorage, Rng};

use super::{AREA_BYTES_MAX, Header, padded, rewrite};
use crate::Qcow2Driver;
use crate::header::Extension;
use crate::layout::{compatible, extension};

fn image(options: &str, backing: Option<&str>) -> Arc<MemoryStorage> {
    let storage = Arc::new(MemoryStorage::with_len("image", 0));
    let driver = Qcow2Driver;
    let request = CreateRequest {
        storage: storage.clone() as Arc<dyn Storage>,
        files: Vec::new(),
        guest_bytes: 1 << 20,
        options: Options::parse("qcow2", driver.options(), [options]).unwrap(),
        backing: backing.map(|name| BackingRef::new(name, Some("qcow2".to_owned()))),
        backing_bytes: None,
    };
    driver.create(&request).unwrap();
    storage
}

fn read(storage: &dyn Storage) -> Header {
    Header::read(storage, &Limits::default()).unwrap()
}

/// What must be entirely old or new after a crash: everything except the feature names.
fn meaning(header: &Header) -> Header {
    let extensions = header
        .extensions
        .iter()
        .filter(|e| e.kind != extension::FEATURE_NAMES)
        .map(|e| Extension { offset: 0, ..e.clone() })
        .collect();
    Header { extensions, header_bytes: 0, ..header.clone() }
}

fn name_of(bytes: usize, seed: u8) -> Option<String> {
    let letter = (b'a' + seed % 26) as char;
    (bytes > 0).then(|| letter.to_string().repeat(bytes))
}

fn with_backing(old: &Header, name: Option<String>, format: Option<&str>) -> Header {
    let mut new = old.clone();
    new.extensions.retain(|e| e.kind != extension::BACKING_FORMAT);
    if let (Some(format), Some(_)) = (format, &name) {
        let data = format.as_bytes().to_vec();
        new.extensions.insert(0, Extension { kind: extension::BACKING_FORMAT, offset: 0, data });
    }
    new.backing_name = name;
    new
}

/// Rewrites the header, and checks the state after each possible crash.
fn try_rewrite(storage: &dyn Storage, new: &Header, rng: &mut Rng, what: &str) -> bool {
    let old = read(storage);
    let crash = CrashStorage::holding(storage);
    if let Err(error) = rewrite(&*crash, &old, new) {
        assert!(error.to_string().contains("room") || error.to_string().contains("one step"));
        // Rejected before any write.
        assert_eq!(crash.ops(), 0, "{what}: {error}");
        return false;
    }
    crash.for_each_crash(|moment, cut| {
        let lots = [cut.survivor(rng), cut.survivor(rng)];
        for survivor in cut.extremes().map(|(_, survivor)| survivor).chain(lots) {
            let found = meaning(&read(&survivor));
            assert!(
                found == meaning(&old) || found == meaning(new),
                "{what}, moment {moment}: {found:?}"
            );
        }
    });
    let done = crash.crash_now();
    assert_eq!(done.unsynced(), 0, "{what}");
    let found = read(&done.only_durable());
    assert_eq!(meaning(&found), meaning(new), "{what}");
    assert_eq!(
        found.extension(extension::FEATURE_NAMES).map(|e| &e.data),
        new.extension(extension::FEATURE_NAMES).map(|e| &e.data),
        "{what}"
    );
    let cluster = old.geometry.cluster_bytes();
    // Nothing is left of what the old header named.
    let mut bytes = vec![0; cluster.min(AREA_BYTES_MAX) as usize];
    done.only_durable().read_padded(&mut bytes, HostOffset(0)).unwrap();
    let last = found.extensions.last().map(|e| e.offset as usize + padded(e.data.len()));
    let list_end = last.unwrap_or(found.header_bytes as usize) + 8;
    let name = be64(&bytes, 8) as usize..be64(&bytes, 8) as usize + be32(&bytes, 16) as usize;
    let stale = (list_end..bytes.len()).find(|at| bytes[*at] != 0 && !name.contains(at));
    assert_eq!(stale, None, "{what}");
    // Nothing but the header's cluster has changed.
    let len = storage.len().unwrap();
    let (mut a, mut b) = (vec![0; (len - cluster) as usize], vec![0; (len - cluster) as usize]);
    storage.read_at(&mut a, HostOffset(cluster)).unwrap();
    done.only_durable().read_at(&mut b, HostOffset(cluster)).unwrap();
    assert!(a == b, "{what}");
    true
}

#[test]
fn the_old_or_the_new_header_whatever_survives() {
    let mut rng = Rng::from_env(40);
    let lengths = [0, 1, 8, 100, 300, 500, 700, 1023];
    let mut done = 0;
    for options in [
        "cluster_size=512",
        "cluster_size=1024",
        "cluster_size=2048",
        "cluster_size=4096",
        "",
        "cluster_size=2M",
        "compat=0.10",
        "compat=0.10,cluster_size=512",
        "extended_l2=on,lazy_refcounts=on,compression_type=zstd",
    ] {
        for old in lengths {
            let Some(start) = name_of(old, 0) else {
                let storage = image(options, None);
                let new = with_backing(&read(&*storage), name_of(200, 1), Some("raw"));
                done += u32::from(try_rewrite(&*storage, &new, &mut rng, options));
                continue;
            };
            if options.contains("512") && old > 200 {
                continue; // no room for such a name
            }
            if options.contains("1024") && old > 300 || options.contains("2048") && old > 1000 {
                continue;
            }
            let storage = image(options, Some(&start));
            for (seed, new) in lengths.into_iter().enumerate() {
                for format in ["qcow2", "raw", "a-long-name"] {
                    let new =
                        with_backing(&read(&*storage), name_of(new, 1 + seed as u8), Some(format));
                    let what = format!("{options}: from {old} to {new:?}");
                    done += u32::from(try_rewrite(&*storage, &new, &mut rng, &what));
                }
                let bare = with_backing(&read(&*storage), name_of(new, 1 + seed as u8), None);
                try_rewrite(&*storage, &bare, &mut rng, &format!("{options}: no format"));
            }
        }
    }
    assert!(done > 500, "{done}");
}

#[test]
fn versions_change_in_one_step_and_unknown_extensions_stay() {
    let mut rng = Rng::from_env(41);
    for options in ["compat=0.10", "compat=0.10,cluster_size=512", "compat=0.10,cluster_size=4096"]
    {
        for name in [None, Some("base"), Some("a/rather/long/name/of/a/base/image.qcow2")] {
            let storage = image(options, name);
            let old = read(&*storage);
            let mut new = old.clone();
            new.version = 3;
            new.compatible = compatible::LAZY_REFCOUNTS;
            let unknown = Extension { kind: 0x1234_5678, offset: 0, data: b"keep me".to_vec() };
            new.extensions.push(unknown);
            if old.geometry.cluster_bytes() >= 2048 {
                new.extensions.push(Header::feature_name_table());
            }
            assert!(try_rewrite(&*storage, &new, &mut rng, options), "{options} {name:?}");
            // And back.
            rewrite(&*storage, &old, &new).unwrap();
            let up = read(&*storage);
            let mut down = up.clone();
            down.version = 2;
            down.compatible = 0;
            down.extensions.retain(|e| e.kind != extension::FEATURE_NAMES);
            assert!(try_rewrite(&*storage, &down, &mut rng, options), "{options} {name:?}");
        }
    }
}

#[test]
fn fields_that_are_not_known_stay() {
    let storage = image("", Some("base"));
    // A longer header, as a newer program might write it.
    let old = read(&*storage);
    let mut raw = vec![0; 4096];
    storage.read_at(&mut raw, HostOffset(0)).unwrap();
    raw.copy_within(112..4096 - 8, 120);
    raw[112..120].copy_from_slice(b"newfield");
    raw[100..104].copy_from_slice(&120u32.to_be_bytes());
    let at = u64::from_be_bytes(raw[8..16].try_into().unwrap()) + 8;
    raw[8..16].copy_from_slice(&at.to_be_bytes());
    storage.write_at(&raw, HostOffset(0)).unwrap();
    let longer = read(&*storage);
    assert_eq!(longer.backing_name, old.backing_name);
    let new = with_backing(&longer, name_of(600, 3), Some("raw"));
    rewrite(&*storage, &longer, &new).unwrap();
    storage.read_at(&mut raw, HostOffset(0)).unwrap();
    assert_eq!(&raw[112..120], b"newfield");
    assert_eq!(read(&*storage).backing_name, name_of(600, 3));
}
