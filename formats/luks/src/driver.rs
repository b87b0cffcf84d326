//! The driver of raw LUKS containers.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, CreateRequest, Creation, DriverInfo, Error, Format, FormatDriver, HostOffset,
    ImageInfo, KeySlots, KeyedImages, Limits, Measured, OfflineImage, OpenRequest, OptionKind,
    OptionSpec, Options, Probe, Repair, Result, Secret, SectorCipher, Storage, in_steps,
};

use crate::format::{LuksFormat, guest_bytes_of, place_of};
use crate::header::{Header, MAGIC, SECTOR_BYTES};
use crate::new::{MadeHeader, NewHeader, OPTIONS};
use crate::slots::LuksSlots;

const SPECS: &[OptionSpec] = &[
    OPTIONS[0],
    OPTIONS[1],
    OPTIONS[2],
    OPTIONS[3],
    OPTIONS[4],
    OPTIONS[5],
    OptionSpec {
        key: "preallocation",
        kind: OptionKind::Word(&["off", "falloc", "full"]),
        default: "off",
        help: "off: a sparse file; falloc: space is reserved; full: encrypted zeroes are written",
    },
];

/// Bytes per write of `preallocation=full`.
const FULL_STEP: u64 = 1 << 20;

/// Raw LUKS containers, version 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct LuksDriver;

impl FormatDriver for LuksDriver {
    fn info(&self) -> DriverInfo {
        DriverInfo {
            name: "luks",
            aliases: &[],
            extensions: &["luks"],
            description: "a raw disk, encrypted: LUKS version 1, as cryptsetup and QEMU know it",
        }
    }

    /// Matches other versions too: an error about the version is better than probing as raw.
    fn probe(&self, head: &[u8], _tail: &[u8], _len: u64) -> Probe {
        if head.starts_with(&MAGIC) { Probe::Yes } else { Probe::No }
    }

    fn describe(&self, storage: &Arc<dyn Storage>, _limits: &Limits) -> Result<ImageInfo> {
        let header = Header::read(&**storage, place_of(&**storage)?)?;
        let mut properties = header.properties();
        properties.push(("payload-offset".to_owned(), header.payload_offset().to_string()));
        let virtual_size = guest_bytes_of(&header, &**storage)?;
        let mut info = ImageInfo::new(self.info().name, virtual_size);
        info.encryption = Some("luks".to_owned());
        info.key_header = Some(header.describe());
        info.properties = properties;
        Ok(info)
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        self.open_with_keys(request, &[])
    }

    /// The header is all the metadata.
    fn check(&self, image: &OfflineImage<'_>, _repair: Repair) -> Result<CheckReport> {
        let storage = &**image.storage;
        let header = Header::read(storage, place_of(storage)?)?;
        guest_bytes_of(&header, storage)?;
        Ok(CheckReport { image_end_offset: storage.len()?, ..CheckReport::default() })
    }

    vdkit_block::capabilities!(creation: Creation, keyed_images: KeyedImages);
}

impl Creation for LuksDriver {
    fn options(&self) -> &'static [OptionSpec] {
        SPECS
    }

    fn create(&self, request: &CreateRequest) -> Result<()> {
        let storage = &*request.storage;
        let remedy =
            "luks has no place for its name; create a qcow2 image with encrypt.format=luks";
        request.refuse_backing("a luks image", remedy)?;
        let new = NewHeader::from_options(&request.options, "")?;
        let (bytes, end) = sizes(&new, request.guest_bytes)?;
        let Some(key) = request.options.key() else {
            return Err(Error::no_new_key(storage.name()));
        };
        let made = new.make(storage.name(), key, &Limits::default())?;
        let payload = new.payload_offset();
        storage.make_empty(end, payload)?;
        match request.options.text("preallocation") {
            Some("falloc") if storage.caps().growable => storage.allocate(HostOffset(0), end)?,
            Some("full") => write_encrypted_zeroes(storage, &made, payload, bytes)?,
            _ => {}
        }
        storage.write_at(&made.bytes, HostOffset(0))?;
        storage.sync()
    }

    fn encrypts(&self, _options: &Options) -> bool {
        true
    }

    fn cluster_bytes(&self, _options: &Options) -> Result<u64> {
        Ok(SECTOR_BYTES)
    }

    /// The file's length: header, key material and the whole disk.
    fn measure(&self, guest_bytes: u64, options: &Options, _clusters: u64) -> Result<Measured> {
        let (_, end) = sizes(&NewHeader::from_options(options, "")?, guest_bytes)?;
        Ok(Measured { required: end, fully_allocated: end })
    }
}

impl KeyedImages for LuksDriver {
    fn open_with_keys(&self, request: OpenRequest, keys: &[Secret]) -> Result<Arc<dyn Format>> {
        Ok(Arc::new(LuksFormat::open(request, keys)?))
    }

    fn key_slots(
        &self,
        storage: &Arc<dyn Storage>,
        limits: &Limits,
    ) -> Result<Option<Box<dyn KeySlots>>> {
        let place = place_of(&**storage)?;
        Ok(Some(Box::new(LuksSlots::read(storage.clone(), place, limits)?)))
    }
}

/// Bytes of the disk, in whole sectors, and of the file.
fn sizes(new: &NewHeader, guest_bytes: u64) -> Result<(u64, u64)> {
    guest_bytes
        .checked_next_multiple_of(SECTOR_BYTES)
        .and_then(|bytes| Some((bytes, bytes.checked_add(new.payload_offset())?)))
        .filter(|(_, end)| *end <= i64::MAX as u64)
        .ok_or_else(|| Error::invalid(format!("a disk of {guest_bytes} bytes is too large")))
}

fn write_encrypted_zeroes(
    storage: &dyn Storage,
    made: &MadeHeader,
    payload: u64,
    bytes: u64,
) -> Result<()> {
    let Some(cipher) = made.cipher() else { return Ok(()) };
    let mut buffer = vec![0; FULL_STEP.min(bytes) as usize];
    in_steps(HostOffset(payload), HostOffset(payload + bytes), FULL_STEP, |at, len| {
        let step = &mut buffer[..len as usize];
        step.fill(0);
        cipher.encrypt(step, (at.0 - payload) / SECTOR_BYTES);
        storage.write_at(step, at)
    })
}
