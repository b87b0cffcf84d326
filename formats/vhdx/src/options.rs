//! Options of new images, with qemu-img's names.

use vdkit_block::{Error, OptionKind, OptionSpec, Options, Result};

use crate::layout::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, GUEST_BYTES_MAX, Geometry, MIB};

const FIXED: &str = "fixed";

/// Options that users may give.
pub(crate) const SPECS: &[OptionSpec] = &[
    OptionSpec {
        key: "subformat",
        kind: OptionKind::Word(&["dynamic", FIXED]),
        default: "dynamic",
        help: "dynamic: blocks come as they are written; fixed: all are there from the beginning",
    },
    OptionSpec {
        key: "block_size",
        kind: OptionKind::Size,
        default: "8M; on a parent: 2M",
        help: "bytes of a block, a power of two from 1M to 256M",
    },
    OptionSpec {
        key: "log_size",
        kind: OptionKind::Size,
        default: "1M",
        help: "bytes of the log, a multiple of 1M",
    },
    OptionSpec {
        key: "logical_sector_size",
        kind: OptionKind::Number,
        default: "512",
        help: "sector size that the guest sees: 512 or 4096",
    },
    OptionSpec {
        key: "block_state_zero",
        kind: OptionKind::Switch,
        default: "on",
        help: "new blocks are said to be zero; off: to be absent, which some readers take for any bytes",
    },
];

/// Longest log of a new image.
const LOG_BYTES_MAX: u64 = 32 * MIB;
/// Block size of new images, for disks of all sizes.
const BLOCK_BYTES: u64 = 8 * MIB;
/// Block size of new differencing images.
const CHILD_BLOCK_BYTES: u64 = 2 * MIB;

/// Properties of a new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NewImage {
    pub(crate) geometry: Geometry,
    pub(crate) fixed: bool,
    pub(crate) log_bytes: u64,
    /// Entries are zero rather than not present.
    pub(crate) zero_blocks: bool,
    /// Size of the disk: whole sectors.
    pub(crate) guest_bytes: u64,
}

impl NewImage {
    /// Reads options.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid values.
    pub(crate) fn new(options: &Options, guest_bytes: u64, has_parent: bool) -> Result<Self> {
        let invalid = |text: String| Err(Error::invalid(text));
        let block = match options.size("block_size").filter(|bytes| *bytes > 0) {
            Some(bytes) => bytes,
            None if has_parent => CHILD_BLOCK_BYTES,
            None => BLOCK_BYTES,
        };
        if !block.is_power_of_two() || !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block) {
            return invalid(format!(
                "option block_size of vhdx is {block}, expected a power of two from 1M to 256M"
            ));
        }
        let log_bytes = options.size("log_size").unwrap_or(MIB);
        if log_bytes == 0 || !log_bytes.is_multiple_of(MIB) || log_bytes > LOG_BYTES_MAX {
            return invalid(format!(
                "option log_size of vhdx is {log_bytes}, expected a multiple of 1M up to 32M"
            ));
        }
        let sector = options.number("logical_sector_size").unwrap_or(512);
        if sector != 512 && sector != 4096 {
            return invalid(format!(
                "option logical_sector_size of vhdx is {sector}, expected 512 or 4096"
            ));
        }
        let fixed = options.text("subformat") == Some(FIXED);
        if fixed && has_parent {
            return invalid("a vhdx image that stands on another one cannot be fixed".to_owned());
        }
        let size = guest_bytes.checked_next_multiple_of(sector).filter(|n| *n <= GUEST_BYTES_MAX);
        let Some(guest_bytes) = size else {
            return invalid(format!("a vhdx image of {guest_bytes} bytes: 64T are the most"));
        };
        let (block_bits, sector_bits) = (block.trailing_zeros(), sector.trailing_zeros());
        Ok(Self {
            geometry: Geometry { block_bits, sector_bits, has_parent },
            fixed,
            log_bytes,
            zero_blocks: !has_parent && options.switch("block_state_zero").unwrap_or(true),
            guest_bytes,
        })
    }

    /// Offset of the metadata region: after the log.
    pub(crate) fn metadata_offset(&self) -> u64 {
        MIB + self.log_bytes
    }

    /// Offset of the block allocation table.
    pub(crate) fn bat_offset(&self) -> u64 {
        self.metadata_offset() + MIB
    }

    /// Least offset of the first block.
    pub(crate) fn data_offset(&self) -> u64 {
        self.bat_offset() + self.geometry.bat_region_bytes(self.guest_bytes)
    }

    pub(crate) fn all_blocks_bytes(&self) -> u64 {
        self.geometry.blocks(self.guest_bytes) << self.geometry.block_bits
    }
}
