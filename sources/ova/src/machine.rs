//! The virtual machine of an appliance, as VMware's tools and VirtualBox need it.

use std::fmt::Write;

use vdkit_block::{Error, OptionKind, OptionSpec, Options, Result};
use vdkit_stream::HashMethod;

use crate::xml::escaped;

/// Maximum disks per controller, and controllers, of a VMware virtual machine: SCSI and SATA.
const SCSI_DISKS: usize = 15;
const SATA_DISKS: usize = 30;
const CONTROLLERS_MAX: usize = 4;
/// The SCSI unit of the controller itself.
const SCSI_OWN_UNIT: usize = 7;
/// The oldest hardware version with disks beyond 2 TiB (ESXi 5.5).
const HARDWARE_VERSION: u64 = 10;

/// Options of a new appliance.
pub const OPTIONS: &[OptionSpec] = &[
    OptionSpec {
        key: "name",
        kind: OptionKind::Text,
        default: "the file's name",
        help: "name of the virtual machine",
    },
    OptionSpec { key: "cpus", kind: OptionKind::Number, default: "1", help: "virtual processors" },
    OptionSpec { key: "memory", kind: OptionKind::Size, default: "2G", help: "memory" },
    OptionSpec {
        key: "os",
        kind: OptionKind::Text,
        default: "linux",
        help: "linux, windows, other, or an identifier of VMware's such as ubuntu64Guest",
    },
    OptionSpec {
        key: "firmware",
        kind: OptionKind::Word(&["bios", "efi"]),
        default: "bios",
        help: "how the guest starts (VirtualBox does not read it)",
    },
    OptionSpec {
        key: "controller",
        kind: OptionKind::Word(&["lsilogic", "lsilogicsas", "pvscsi", "ahci"]),
        default: "lsilogic",
        help: "what the disks are attached to",
    },
    OptionSpec {
        key: "network",
        kind: OptionKind::Text,
        default: "VM Network",
        help: "network of the one adapter, or none",
    },
    OptionSpec {
        key: "hwversion",
        kind: OptionKind::Number,
        default: "10",
        help: "version of VMware's virtual hardware: 7 to 21",
    },
    OptionSpec {
        key: "manifest",
        kind: OptionKind::Word(&["sha256", "sha1"]),
        default: "sha256",
        help: "hashes of the manifest; vSphere before 6.5 knows sha1 alone",
    },
];

/// Firmware of a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Firmware {
    /// A BIOS.
    Bios,
    /// UEFI.
    Efi,
}

/// Disk controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// SCSI, LSI Logic parallel: every guest has a driver for it.
    LsiLogic,
    /// SCSI, LSI Logic SAS.
    LsiLogicSas,
    /// SCSI, paravirtualized.
    ParaVirtual,
    /// SATA.
    Ahci,
}

impl Controller {
    /// CIM's resource type, and the subtype of VMware and VirtualBox.
    fn types(self) -> (u32, &'static str) {
        match self {
            Self::LsiLogic => (6, "lsilogic"),
            Self::LsiLogicSas => (6, "lsilogicsas"),
            Self::ParaVirtual => (6, "VirtualSCSI"),
            Self::Ahci => (20, "vmware.sata.ahci"),
        }
    }

    fn disks(self) -> usize {
        if self == Self::Ahci { SATA_DISKS } else { SCSI_DISKS }
    }

    /// Unit number of the n-th disk.
    fn unit(self, index: usize) -> usize {
        let skips = self != Self::Ahci && index >= SCSI_OWN_UNIT;
        index + usize::from(skips)
    }

    /// The adapter type of its VMDKs.
    pub fn vmdk_adapter(self) -> &'static str {
        if self == Self::Ahci { "ide" } else { "lsilogic" }
    }
}

/// A virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Number of processors.
    pub cpus: u64,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Operating system: CIM's number, and VMware's name.
    pub os: (u32, String),
    /// Firmware.
    pub firmware: Firmware,
    /// Disk controller.
    pub controller: Controller,
    /// Network of its adapter; `None` for no adapter.
    pub network: Option<String>,
    /// The version of VMware's virtual hardware.
    pub hardware_version: u64,
    /// Hash method of the manifest.
    pub hash: HashMethod,
}

impl Machine {
    /// The machine described by [`OPTIONS`]; `name` is the default name.
    ///
    /// # Errors
    /// [`Error::Invalid`] for values out of range.
    pub fn new(options: &Options, name: &str) -> Result<Self> {
        let number = |key: &str, default: u64, range: std::ops::RangeInclusive<u64>| {
            let value = options.number(key).unwrap_or(default);
            if range.contains(&value) {
                return Ok(value);
            }
            let (low, high) = (range.start(), range.end());
            Err(Error::invalid(format!("option {key} of ova is {value}, expected {low} to {high}")))
        };
        let memory_bytes = options.size("memory").unwrap_or(2 << 30);
        if memory_bytes == 0 || !memory_bytes.is_multiple_of(4 << 20) {
            let text = "option memory of ova must be a multiple of 4M, as vSphere asks for";
            return Err(Error::invalid(text));
        }
        let name = options.text("name").unwrap_or(name).trim();
        if name.is_empty() || name.chars().count() > 80 || name.chars().any(char::is_control) {
            let text = "option name of ova must have 1 to 80 characters, as vSphere asks for";
            return Err(Error::invalid(text));
        }
        let network = options.text("network").unwrap_or("VM Network");
        Ok(Self {
            name: name.to_owned(),
            cpus: number("cpus", 1, 1..=768)?,
            memory_bytes,
            os: operating_system(options.text("os").unwrap_or("linux"))?,
            firmware: match options.text("firmware") {
                Some("efi") => Firmware::Efi,
                _ => Firmware::Bios,
            },
            controller: match options.text("controller") {
                Some("lsilogicsas") => Controller::LsiLogicSas,
                Some("pvscsi") => Controller::ParaVirtual,
                Some("ahci") => Controller::Ahci,
                _ => Controller::LsiLogic,
            },
            network: (network != "none").then(|| network.to_owned()),
            hardware_version: number("hwversion", HARDWARE_VERSION, 7..=21)?,
            hash: match options.text("manifest") {
                Some("sha1") => HashMethod::Sha1,
                _ => HashMethod::Sha256,
            },
        })
    }

    /// Fails if there are more disks than units.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub(crate) fn check_disks(&self, disks: usize) -> Result<()> {
        let most = CONTROLLERS_MAX * self.controller.disks();
        if (1..=most).contains(&disks) {
            return Ok(());
        }
        Err(Error::invalid(format!("an appliance of {disks} disks: it has 1 to {most}")))
    }
}

/// Numbers of CIM_OperatingSystem, and vSphere's names for them.
fn operating_system(text: &str) -> Result<(u32, String)> {
    let known = [
        ("linux", 101, "otherLinux64Guest"),
        ("windows", 1, "windows9Server64Guest"),
        ("other", 102, "otherGuest64"),
    ];
    if let Some((_, number, name)) = known.iter().find(|(word, ..)| *word == text) {
        return Ok((*number, (*name).to_owned()));
    }
    let letters = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let guest = text.ends_with("Guest") || text.ends_with("Guest64");
    if letters && guest && text.len() <= 64 {
        // 1 is CIM's number for others; vSphere uses its own name.
        return Ok((1, text.to_owned()));
    }
    Err(Error::invalid(format!(
        "option os of ova is '{text}', expected linux, windows, other, or an identifier of VMware's \
         such as ubuntu64Guest"
    )))
}

/// A disk for the descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DescribedDisk<'a> {
    pub(crate) file: &'a str,
    pub(crate) file_bytes: u64,
    pub(crate) capacity: u64,
    /// Bytes of the disk with data.
    pub(crate) populated: u64,
}

const NAMESPACES: &str = "xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" \
    xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\" \
    xmlns:rasd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData\" \
    xmlns:vssd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData\" \
    xmlns:vmw=\"http://www.vmware.com/schema/ovf\" \
    xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\"";
const FORMAT: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";

/// Writes the descriptor of an appliance.
pub(crate) fn descriptor(machine: &Machine, disks: &[DescribedDisk<'_>]) -> String {
    let mut out = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Envelope {NAMESPACES}>\n");
    out.push_str("  <References>\n");
    for (number, disk) in (1..).zip(disks) {
        let (file, bytes) = (escaped(disk.file), disk.file_bytes);
        let _ = writeln!(
            out,
            "    <File ovf:href=\"{file}\" ovf:id=\"file{number}\" ovf:size=\"{bytes}\"/>"
        );
    }
    out.push_str("  </References>\n  <DiskSection>\n    <Info>Virtual disks</Info>\n");
    for (number, disk) in (1..).zip(disks) {
        let (capacity, populated) = (disk.capacity, disk.populated);
        let _ = writeln!(
            out,
            "    <Disk ovf:capacity=\"{capacity}\" ovf:capacityAllocationUnits=\"byte\" \
             ovf:diskId=\"vmdisk{number}\" ovf:fileRef=\"file{number}\" ovf:format=\"{FORMAT}\" \
             ovf:populatedSize=\"{populated}\"/>"
        );
    }
    out.push_str("  </DiskSection>\n");
    if let Some(network) = &machine.network {
        let name = escaped(network);
        let _ = writeln!(
            out,
            "  <NetworkSection>\n    <Info>Networks</Info>\n    <Network ovf:name=\"{name}\">\n      \
             <Description>{name}</Description>\n    </Network>\n  </NetworkSection>"
        );
    }
    virtual_system(&mut out, machine, disks.len());
    out.push_str("</Envelope>\n");
    out
}

fn virtual_system(out: &mut String, machine: &Machine, disks: usize) {
    let (name, (number, os)) = (escaped(&machine.name), &machine.os);
    let version = machine.hardware_version;
    let _ = write!(
        out,
        "  <VirtualSystem ovf:id=\"{name}\">
    <Info>A virtual machine</Info>
    <Name>{name}</Name>
    <OperatingSystemSection ovf:id=\"{number}\" vmw:osType=\"{os}\">
      <Info>The guest's operating system</Info>
    </OperatingSystemSection>
    <VirtualHardwareSection>
      <Info>Virtual hardware</Info>
      <System>
        <vssd:ElementName>Virtual Hardware Family</vssd:ElementName>
        <vssd:InstanceID>0</vssd:InstanceID>
        <vssd:VirtualSystemIdentifier>{name}</vssd:VirtualSystemIdentifier>
        <vssd:VirtualSystemType>vmx-{version:02}</vssd:VirtualSystemType>
      </System>
"
    );
    let mut items = Items { out, instance: 0 };
    let (cpus, mebibytes) = (machine.cpus.to_string(), (machine.memory_bytes >> 20).to_string());
    items.add(
        "3",
        "Processors",
        &[("AllocationUnits", "hertz * 10^6"), ("VirtualQuantity", &cpus)],
    );
    items.add(
        "4",
        "Memory",
        &[("AllocationUnits", "byte * 2^20"), ("VirtualQuantity", &mebibytes)],
    );
    disk_items(&mut items, machine.controller, disks);
    if let Some(network) = &machine.network {
        items.add(
            "10",
            "Network adapter",
            &[
                ("AutomaticAllocation", "true"),
                ("Connection", network),
                ("ResourceSubType", "E1000"),
            ],
        );
    }
    let firmware = if machine.firmware == Firmware::Efi { "efi" } else { "bios" };
    let _ = write!(
        out,
        "      <vmw:Config ovf:required=\"false\" vmw:key=\"firmware\" vmw:value=\"{firmware}\"/>
    </VirtualHardwareSection>
  </VirtualSystem>
"
    );
}

fn disk_items(items: &mut Items<'_>, controller: Controller, disks: usize) {
    let (kind, subtype) = controller.types();
    for (bus, first) in (0..disks).step_by(controller.disks()).enumerate() {
        let (kind, address) = (kind.to_string(), bus.to_string());
        let name = format!("Controller {bus}");
        let fields = [("Address", &*address), ("ResourceSubType", subtype)];
        let parent = items.add(&kind, &name, &fields).to_string();
        for disk in first..disks.min(first + controller.disks()) {
            let unit = controller.unit(disk - first).to_string();
            let resource = format!("ovf:/disk/vmdisk{}", disk + 1);
            items.add(
                "17",
                &format!("Hard disk {}", disk + 1),
                &[("AddressOnParent", &unit), ("HostResource", &resource), ("Parent", &parent)],
            );
        }
    }
}

/// Writes the virtual hardware items.
struct Items<'a> {
    out: &'a mut String,
    instance: u32,
}

impl Items<'_> {
    /// Adds an item; returns its instance number.
    fn add(&mut self, kind: &str, name: &str, fields: &[(&str, &str)]) -> u32 {
        self.instance += 1;
        let instance = self.instance.to_string();
        let common = [("ElementName", name), ("InstanceID", &instance), ("ResourceType", kind)];
        let mut fields: Vec<_> = common.iter().chain(fields).collect();
        // The schema orders them alphabetically, and some readers require it.
        fields.sort_unstable();
        self.out.push_str("      <Item>\n");
        for (field, value) in fields {
            let value = escaped(value);
            let _ = writeln!(self.out, "        <rasd:{field}>{value}</rasd:{field}>");
        }
        self.out.push_str("      </Item>\n");
        self.instance
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::Descriptor;

    fn machine(options: &str) -> Result<Machine> {
        Machine::new(&Options::parse("ova", OPTIONS, [options])?, "plain")
    }

    #[test]
    fn the_descriptor_says_what_the_options_ask_for() {
        let name = "name=a & \"b\",cpus=4,memory=8G,firmware=efi,os=ubuntu64Guest,network=a<b";
        let machine = machine(name).unwrap();
        let disk = |number: u64| DescribedDisk {
            file: "x-1.vmdk",
            file_bytes: number,
            capacity: number << 30,
            populated: 5,
        };
        let text = descriptor(&machine, &[disk(1), disk(2)]);
        let found = Descriptor::parse("a", 0, text.as_bytes()).unwrap();
        assert_eq!(found.system.as_deref(), Some("a & \"b\""));
        assert_eq!(found.files.len(), 2);
        assert_eq!((found.disks[1].capacity, found.files[1].size), (Some(2 << 30), Some(2)));
        assert_eq!(found.disks[0].file.as_deref(), Some("file1"));
        for wanted in [
            "<rasd:VirtualQuantity>8192</rasd:VirtualQuantity>",
            "<rasd:Connection>a&lt;b</rasd:Connection>",
            "vmw:osType=\"ubuntu64Guest\"",
            "vmw:value=\"efi\"",
            "vmx-10<",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
    }

    #[test]
    fn every_disk_has_a_place_and_no_place_two() {
        for (options, disks, controllers) in
            [("", 1, 1), ("", 16, 2), ("controller=ahci", 31, 2), ("controller=pvscsi", 60, 4)]
        {
            let machine = machine(options).unwrap();
            machine.check_disks(disks).unwrap();
            let disk = DescribedDisk { file: "d", file_bytes: 0, capacity: 512, populated: 0 };
            let text = descriptor(&machine, &vec![disk; disks]);
            let field = |item: &str, name: &str| {
                let start = item.find(&format!("<rasd:{name}>"))? + name.len() + 7;
                Some(item[start..].split('<').next().unwrap_or_default().to_owned())
            };
            let items: Vec<_> = text.split("<Item>").skip(1).collect();
            let places: Vec<_> = items
                .iter()
                .filter_map(|item| Some((field(item, "Parent")?, field(item, "AddressOnParent")?)))
                .collect();
            assert_eq!(places.len(), disks);
            assert!((1..places.len()).all(|i| !places[..i].contains(&places[i])), "{places:?}");
            let scsi = !options.contains("ahci");
            assert!(!scsi || places.iter().all(|(_, unit)| unit != "7"));
            let kind = if scsi { "6" } else { "20" };
            let found = items.iter().filter(|i| field(i, "ResourceType").as_deref() == Some(kind));
            assert_eq!(found.count(), controllers);
        }
        let plain = machine("").unwrap();
        assert!(plain.check_disks(61).is_err() && plain.check_disks(0).is_err());
        assert!(machine("network=none").unwrap().network.is_none());
    }

    #[test]
    fn values_out_of_bounds_are_refused() {
        for bad in [
            "cpus=0",
            "cpus=1000",
            "memory=1M",
            "memory=0",
            "name=",
            "os=amiga",
            "os=a\"Guest",
            "hwversion=6",
            "firmware=coreboot",
            "manifest=md5",
        ] {
            assert!(machine(bad).is_err(), "{bad}");
        }
        assert_eq!(machine("").unwrap().name, "plain");
        assert_eq!(machine("os=windows").unwrap().os.1, "windows9Server64Guest");
    }
}
