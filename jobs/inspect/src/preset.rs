//! Requirements of hypervisors and clouds on an image: format, options, size.

use std::fmt;
use std::str::FromStr;

use vdkit_block::Error;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// The target platform. `docs/commands/validate.md` lists the sources of each platform's
/// requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Preset {
    /// KVM with QEMU or libvirt.
    Kvm,
    /// OpenStack's image service.
    Openstack,
    /// Google Compute Engine.
    Gcp,
    /// AWS VM Import.
    Aws,
    /// Azure's managed disks.
    Azure,
    /// vSphere and ESXi.
    Vmware,
    /// Hyper-V.
    Hyperv,
    /// VirtualBox.
    Virtualbox,
}

/// Purpose of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Use {
    /// A guest will write to it.
    Disk,
    /// It transports a disk once.
    Delivery,
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 8] = [
        Self::Kvm,
        Self::Openstack,
        Self::Gcp,
        Self::Aws,
        Self::Azure,
        Self::Vmware,
        Self::Hyperv,
        Self::Virtualbox,
    ];

    /// The name that users type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Openstack => "openstack",
            Self::Gcp => "gcp",
            Self::Aws => "aws",
            Self::Azure => "azure",
            Self::Vmware => "vmware",
            Self::Hyperv => "hyperv",
            Self::Virtualbox => "virtualbox",
        }
    }

    /// The image format.
    pub fn format(self) -> &'static str {
        match self {
            Self::Kvm | Self::Openstack => "qcow2",
            Self::Gcp | Self::Aws => "raw",
            Self::Azure => "vpc",
            Self::Vmware => "vmdk",
            Self::Hyperv => "vhdx",
            Self::Virtualbox => "vdi",
        }
    }

    /// The format's options, as users write them; the user's own options follow these.
    pub fn options(self, made_for: Use) -> &'static str {
        match (self, made_for) {
            (Self::Azure, _) => "subformat=fixed,force_size=on",
            (Self::Vmware, Use::Disk) => "subformat=monolithicFlat,adapter_type=lsilogic",
            (Self::Vmware, Use::Delivery) => "subformat=streamOptimized,adapter_type=lsilogic",
            _ => "",
        }
    }

    /// The disk size must be a multiple of this.
    pub fn unit(self) -> u64 {
        match self {
            Self::Gcp => GIB,
            Self::Azure => MIB,
            _ => 512,
        }
    }

    /// [`Preset::unit`] in words.
    pub fn unit_name(self) -> &'static str {
        match self {
            Self::Gcp => "GiB",
            Self::Azure => "MiB",
            _ => "sectors",
        }
    }

    /// Maximum disk size in bytes, by format.
    pub fn size_max(self, format: &str) -> Option<u64> {
        match (self, format) {
            // Microsoft, "Azure managed disk types": 32,767 GiB; two types allow up to 65,536 GiB,
            // but only for empty disks.
            (Self::Azure, _) => Some(32 * TIB - GIB),
            (Self::Aws, _) => Some(16 * TIB),
            (Self::Vmware, _) => Some(62 * TIB),
            (Self::Hyperv, "vpc") => Some(2040 * GIB),
            (Self::Hyperv, _) => Some(64 * TIB),
            _ => None,
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Preset {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|preset| preset.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|preset| preset.name()).collect();
            Error::invalid(format!("'{text}' is no target; known: {}", names.join(", ")))
        })
    }
}
