//! `vdkit create`: creates an image.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::jobs::{self, CreateOptions, NewBacking, Preset, Use};
use vdkit::{OpenOptions, Options};

use super::{Run, Subcommand, runs};
use crate::arguments::{FormatOptions, Json, ProgressOption, References, size};
use crate::failure::{Exit, Failure, Outcome, Tone, print_line, quoted};
use crate::guard;
use crate::keys::NewImageKey;
use crate::output::bytes_long;
use crate::protocols;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "create",
    about: "Create an image, empty or with a backing image",
    details: "\
The format is given by -f, or by the ending of the name, or is raw. The image gets its name when \
it is complete: a failure leaves an existing file as it was. An overlay (--backing) reads like its \
backing image until it is written to.",
    examples: "
vdkit create disk.qcow2 20G
vdkit create disk.qcow2 20G -o cluster_size=1M,preallocation=metadata
vdkit create overlay.qcow2 --backing base.qcow2   an overlay of the same size
vdkit create disk.raw 10G --for gcp               format, options and size for Google Cloud
vdkit create -f qcow2 /dev/vg0/guest 20G          on a block device
",
    ..runs::<CreateArgs>()
};

/// A size on the command line.
#[derive(Clone, Copy, Debug)]
struct Asked {
    bytes: u64,
    unit: bool,
}

fn asked(text: &str) -> Result<Asked, String> {
    let unit = text.ends_with(|last: char| last.is_ascii_alphabetic());
    size(text).map(|bytes| Asked { bytes, unit })
}

#[derive(Args, Debug)]
pub struct CreateArgs {
    /// The new image, or a block device
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Size of the guest disk (default: that of the backing image or of the device)
    #[arg(value_name = "SIZE", value_parser = asked)]
    size: Option<Asked>,
    /// Format of the image (default: from the ending of its name, or raw)
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    #[command(flatten)]
    options: FormatOptions,
    /// Choose format, options and size for kvm, openstack, gcp, aws, azure, vmware, hyperv or
    /// virtualbox
    #[arg(long = "for", value_name = "TARGET")]
    made_for: Option<Preset>,
    /// Backing image of the new image; a relative name starts at the new image's folder
    #[arg(short = 'b', long, value_parser = NonEmptyStringValueParser::new(), value_name = "FILE", value_hint = ValueHint::FilePath)]
    backing: Option<String>,
    /// Format of the backing image (default: probed from its header)
    #[arg(short = 'F', long, value_name = "FORMAT", requires = "backing")]
    backing_format: Option<String>,
    /// Do not open the backing image; needs SIZE and --backing-format
    #[arg(short = 'u', long, requires = "backing", requires = "backing_format", requires = "size")]
    unsafe_backing: bool,
    /// Replace an existing file, or the content of a block device
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    references: References,
    #[command(flatten)]
    key: NewImageKey,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct CreateAnswer {
    filename: String,
    format: &'static str,
    virtual_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename_format: Option<String>,
}

impl CreateArgs {
    /// The backing image, from `--backing` or, as with qemu-img, from `-o backing_file`.
    fn new_backing(&self, options: &Options) -> Result<Option<NewBacking>, Failure> {
        let pick = |flag: &Option<String>, key: &str| match (flag, options.text(key)) {
            (Some(flag), Some(option)) if flag != option => {
                Err(Failure::usage(format!("'{flag}' and -o {key}={option} contradict each other")))
            }
            (flag, option) => Ok(flag.clone().or(option.map(str::to_owned))),
        };
        let format = pick(&self.backing_format, "backing_fmt")?;
        let name = pick(&self.backing, "backing_file")?;
        Ok(name.map(|name| NewBacking::new(name, format).open(!self.unsafe_backing)))
    }

    /// Prints a note if the format rounded the size, or if the size is so small that a unit is
    /// probably missing.
    fn note_size(&self, format: &str, guest_bytes: u64) {
        /// A size below this probably lacks its unit.
        const SMALL: u64 = 64 << 10;
        let Some(Asked { bytes: asked, unit }) = self.size else { return };
        let mut said = Vec::new();
        if guest_bytes != asked {
            said.push(format!(
                "{} asked for, and the disk has {guest_bytes}: the next size that a {format} image can \
                 have",
                if asked == 1 { "1 byte was".to_owned() } else { format!("{asked} bytes were") }
            ));
        }
        if !unit && (1..SMALL).contains(&asked) {
            said.push("a size without a unit is in bytes: 20G is 20 GiB".to_owned());
        }
        if !said.is_empty() {
            print_line(Tone::Note, &said.join("; "));
        }
    }
}

impl Run for CreateArgs {
    fn run(self, session: &mut Session) -> Outcome {
        protocols::refuse_target(&self.image)?;
        let driver = super::target_driver(self.made_for, self.format.as_deref(), &self.image)?;
        let preset = self.made_for.map(|preset| preset.options(Use::Disk));
        let options = self.options.parse(driver, preset, self.key.key())?;
        let backing = self.new_backing(&options)?;
        let size = self.size.map(|asked| asked.bytes);
        if let (Some(preset), Some(bytes)) = (self.made_for, size)
            && !bytes.is_multiple_of(preset.unit())
        {
            return Err(Failure::usage(format!(
                "{preset} takes disks of whole {}, not {}",
                preset.unit_name(),
                bytes_long(bytes)
            )));
        }
        if size.is_none() && backing.is_none() && !super::is_device(&self.image) {
            let image = self.image.display().to_string();
            return Err(Failure::usage(format!("{image}: a size is needed"))
                .hint(format!("'vdkit create {} 20G' makes a disk of 20 GiB", quoted(&image))));
        }
        if !self.force
            && self.image.metadata().is_ok_and(|found| found.is_file() && found.len() > 0)
        {
            let image = self.image.display();
            return Err(Failure::failed(format!("{image}: is there already"))
                .hint("'--force' replaces it, with all that is in it"));
        }
        let create = CreateOptions::new(&self.image, driver)
            .guest_bytes(size)
            .options(options)
            .backing(backing)
            .replace(self.force)
            .opening(OpenOptions::read_only().refs(self.references.policy()));
        guard::refuse_occupied(&self.image, self.force, None)?;
        let cancel = session.cancel_on_signal()?;
        // Applies with `--force` too: `--force` gives up the old image, not the overlays that
        // depend on it.
        guard::refuse_replacing(&self.image, &cancel)
            .map_err(|failure| failure.hint("if they are of no use either, remove them first"))?;
        let created = self.progress.run("create", session, |monitor| {
            jobs::create(&vdkit::registry(), &create, monitor)
        })??;
        self.note_size(driver.name(), created.guest_bytes);
        let answer = CreateAnswer {
            filename: self.image.display().to_string(),
            format: driver.name(),
            virtual_size: created.guest_bytes,
            backing_filename_format: created.backing.as_ref().and_then(|b| b.format.clone()),
            backing_filename: created.backing.map(|backing| backing.name),
        };
        self.json.print(&answer, &mut session.out, |answer, out| {
            let size = bytes_long(answer.virtual_size);
            let on = match &answer.backing_filename {
                Some(name) => format!(", backing image {name}"),
                None => String::new(),
            };
            out.line(format!("{}: {}, {size}{on}", answer.filename, answer.format))
        });
        Ok(Exit::Done)
    }
}
