//! Images whose file ends before clusters that they refer to: a write there grows the file again.

mod common;

use std::sync::Arc;

use common::{first_l2, open, write_cluster};
use vdkit_block::{
    Error, FileIndex, Format, FormatDriver, GuestOffset, HostOffset, OfflineImage, Place, Repair,
    Result, Storage,
};
use vdkit_qcow2::Qcow2Driver;
use vdkit_qcow2::layout::ZERO;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{FaultKind, FaultPlan, FaultyStorage, create_image};

const CLUSTER: u64 = 512;
const WRITTEN: u64 = 24;

/// An image of which the last clusters were cut off: guest clusters from the returned one on.
fn cut() -> (Arc<dyn Storage>, u64) {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create_image(&Qcow2Driver, storage.clone(), 4 << 20, "cluster_size=512");
    let image = open(&storage);
    (0..WRITTEN).for_each(|cluster| write_cluster(&*image, cluster * CLUSTER, 1).unwrap());
    image.close().unwrap();
    let lost = WRITTEN - 8;
    let Place::Data { offset, .. } = image.resolve(GuestOffset(lost * CLUSTER), 1).unwrap().place
    else {
        panic!("no data")
    };
    storage.set_len(offset.0).unwrap();
    (storage, lost)
}

/// Writes as a disk does: in place, or to a reservation.
fn write(image: &dyn Format, cluster: u64, byte: u8) -> Result<()> {
    for _ in 0..3 {
        let extent = image.resolve(GuestOffset(cluster * CLUSTER), CLUSTER)?;
        if let Place::Data { offset, exclusive: true, .. } = extent.place {
            return image.file(FileIndex(0)).write_at(&[byte; CLUSTER as usize], offset);
        }
        if let Some(place) = image.reserve(GuestOffset(cluster * CLUSTER), CLUSTER)? {
            image
                .file(FileIndex(0))
                .write_at(&[byte; CLUSTER as usize], place.host_of(cluster * CLUSTER))?;
            return place.publish();
        }
    }
    panic!("the map does not settle")
}

fn read(image: &dyn Format, cluster: u64) -> u8 {
    let mut byte = [0];
    match image.resolve(GuestOffset(cluster * CLUSTER), CLUSTER).unwrap().place {
        Place::Data { offset, .. } => {
            image.file(FileIndex(0)).read_padded(&mut byte, offset).unwrap();
        }
        Place::Hole | Place::Zero { .. } => {}
        place => panic!("{place:?}"),
    }
    byte[0]
}

fn references_beyond_the_end(storage: &Arc<dyn Storage>) -> u64 {
    Qcow2Driver.check(&OfflineImage::new(storage), Repair::Nothing).unwrap().corruptions
}

#[test]
fn a_write_beyond_the_end_of_the_file_stays() {
    let (storage, lost) = cut();
    let image = open(&storage);
    write(&*image, lost + 3, 2).unwrap();
    image.close().unwrap();
    let image = open(&storage);
    assert_eq!(read(&*image, lost + 3), 2);
    assert_eq!(read(&*image, lost + 4), 0);
    // The file grows by tables, refcount blocks and data, past what it refers to already.
    for cluster in WRITTEN..1500 {
        write(&*image, cluster, 3).unwrap();
    }
    for cluster in lost..WRITTEN {
        assert_eq!(read(&*image, cluster), if cluster == lost + 3 { 2 } else { 0 });
        write(&*image, cluster, 4).unwrap();
    }
    image.close().unwrap();
    let image = open(&storage);
    for cluster in 0..1500 {
        let written = if cluster < lost {
            1
        } else if cluster < WRITTEN {
            4
        } else {
            3
        };
        assert_eq!(read(&*image, cluster), written, "{cluster}");
    }
    image.close().unwrap();
    assert_eq!(references_beyond_the_end(&storage), 0);
}

/// A zeroed cluster that keeps its space is written in place.
#[test]
fn a_zeroed_cluster_beyond_the_end_of_the_file_is_written_there() {
    let (storage, lost) = cut();
    let image = open(&storage);
    image.zero(GuestOffset(lost * CLUSTER), 8 * CLUSTER, false).unwrap();
    image.close().unwrap();
    let image = open(&storage);
    (lost..WRITTEN - 1).for_each(|cluster| write(&*image, cluster, 2).unwrap());
    image.close().unwrap();
    let image = open(&storage);
    assert!((lost..WRITTEN - 1).all(|cluster| read(&*image, cluster) == 2));
    (WRITTEN..100).for_each(|cluster| write(&*image, cluster, 3).unwrap());
    image.close().unwrap();
    let image = open(&storage);
    assert!((lost..WRITTEN - 1).all(|cluster| read(&*image, cluster) == 2));
    assert!((WRITTEN..100).all(|cluster| read(&*image, cluster) == 3));
}

#[test]
fn discarded_clusters_beyond_the_end_of_the_file_are_not_handed_out() {
    let (storage, lost) = cut();
    let image = open(&storage);
    image.discard(GuestOffset(lost * CLUSTER), 8 * CLUSTER).unwrap();
    image.flush().unwrap();
    write(&*image, lost + 2, 2).unwrap();
    image.close().unwrap();
    assert_eq!(references_beyond_the_end(&storage), 0);
    let image = open(&storage);
    (WRITTEN..100).for_each(|cluster| write(&*image, cluster, 3).unwrap());
    image.close().unwrap();
    let image = open(&storage);
    assert_eq!(read(&*image, lost + 2), 2);
    assert!((WRITTEN..100).all(|cluster| read(&*image, cluster) == 3));
}

/// Another entry could get such a cluster.
#[test]
fn a_write_to_a_cluster_beyond_the_end_that_is_not_counted_is_refused() {
    for flag in [0, ZERO] {
        let (storage, lost) = cut();
        let mut word = [0; 8];
        let entry = HostOffset(first_l2(&*storage) + lost * 8);
        storage.read_at(&mut word, entry).unwrap();
        let far = (u64::from_be_bytes(word) | flag) + (1 << 40);
        storage.write_at(&far.to_be_bytes(), entry).unwrap();
        let image = open(&storage);
        let Err(Error::Corrupt(fault)) = write(&*image, lost, 2) else { panic!("not refused") };
        assert!(fault.offset >= 1 << 40 && fault.structure == "refcount", "{fault}");
        write(&*image, WRITTEN, 3).unwrap();
        image.close().unwrap();
        assert!(storage.len().unwrap() < 1 << 20);
    }
}

/// An entry may name a place that no file of the host can have.
#[test]
fn a_file_that_cannot_be_that_long_still_grows_where_it_ends() {
    let (storage, lost) = cut();
    let faulty = FaultyStorage::new(storage.clone());
    let image = open(&(faulty.clone() as Arc<dyn Storage>));
    faulty.arm(FaultPlan::nth(&[FaultKind::SetLen], 0));
    write(&*image, lost + 7, 2).unwrap_err();
    faulty.heal();
    write(&*image, WRITTEN, 3).unwrap();
    write(&*image, lost + 7, 4).unwrap();
    image.close().unwrap();
    let image = open(&storage);
    assert_eq!((read(&*image, WRITTEN), read(&*image, lost + 7)), (3, 4));
}
