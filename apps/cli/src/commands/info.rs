//! `vdkit info`: prints an image's metadata.

mod appliance;

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit::jobs::Described;
use vdkit::{
    BackingChoice, BitmapInfo, ChainLink, ChainReport, ChangedParent, Error, ImageInfo,
    SnapshotInfo,
};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, Opening};
use crate::failure::{Exit, Outcome, Tone, print_line};
use crate::incoming::OVA;
use crate::output::{Fields, Output, Table, bytes_long, bytes_short};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "info",
    about: "Show an image's format, sizes, options, snapshots and bitmaps",
    details: "\
Reads the image's header and small tables, never its data. Opens no other file without --chain. So \
it is fast and safe on any image, even an untrusted one. For an appliance (OVA) it lists the \
disks.",
    examples: "
vdkit info disk.qcow2
vdkit info --chain overlay.qcow2         with every image of its backing chain
vdkit info appliance.ova                 the disks of an appliance
vdkit info --json disk.qcow2 | jq '.\"virtual-size\"'
",
    ..runs::<InfoArgs>()
};

#[derive(Args, Debug)]
pub struct InfoArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Describe every image of the backing chain
    #[arg(long)]
    chain: bool,
    #[command(flatten)]
    opening: Opening,
    #[command(flatten)]
    json: Json,
}

impl Run for InfoArgs {
    fn run(self, session: &mut Session) -> Outcome {
        if self.opening.format.as_deref() == Some(OVA) {
            return self.appliance(session);
        }
        let mut options = self.opening.options();
        if !self.chain {
            options.backing = BackingChoice::Ignore;
        }
        let report = match vdkit::describe_chain(&vdkit::registry(), &self.image, &options) {
            // Test for an appliance only after opening it as a disk was refused, so that other
            // images cost no extra read.
            Err(Error::Unsupported { .. })
                if options.format.is_none() && appliance::is_one(&self.image) =>
            {
                return self.appliance(session);
            }
            described => described?,
        };
        print(&report, self.chain, self.json, &mut session.out);
        session.out.flush();
        for pair in report.links.windows(2) {
            if let Some(changed) = ChangedParent::between(&pair[0], &pair[1]) {
                print_line(Tone::Warning, &format!("{}: {changed}", pair[0].path.display()));
            }
        }
        // Images above the break have been described. The error at the break decides the exit code.
        match report.broken {
            Some(error) => Err(error.into()),
            None => Ok(Exit::Done),
        }
    }
}

impl InfoArgs {
    fn appliance(&self, session: &mut Session) -> Outcome {
        let package = appliance::open(&self.image, &self.opening)?;
        appliance::print(&package, &self.image, self.json, &mut session.out)?;
        Ok(Exit::Done)
    }
}

fn print(report: &ChainReport, chain: bool, json: Json, out: &mut Output) {
    match (json.json, chain) {
        (true, true) => {
            out.json(&report.links.iter().map(Described::from).collect::<Vec<_>>());
        }
        (true, false) => {
            for link in &report.links {
                out.json(&Described::from(link));
            }
        }
        (false, _) => {
            for (i, link) in report.links.iter().enumerate() {
                if i > 0 {
                    out.line("");
                }
                print_image(link, out);
            }
        }
    }
}

fn print_image(link: &ChainLink, out: &mut Output) {
    let info = &link.info;
    let mut fields = Fields::default();
    fields.add("image", link.path.display().to_string());
    let probed = if link.probed { "" } else { " (given by -f)" };
    fields.add("format", format!("{}{probed}", info.format));
    fields.add("virtual size", bytes_long(info.virtual_size));
    if super::is_export(&link.path) {
        fields.add("on", "an NBD server");
    } else if link.host.device {
        fields.add("on", "a block device");
    } else {
        fields.add("disk size", bytes_long(link.host.allocated_bytes));
        fields.add("file length", bytes_long(link.host.file_bytes));
    }
    if let Some(bytes) = info.cluster_size {
        fields.add("cluster size", bytes_long(bytes));
    }
    if let Some(method) = info.compression {
        fields.add("compression", method);
    }
    if let Some(method) = &info.encryption {
        fields.add("encryption", method);
    }
    if let Some(name) = &info.backing_file {
        fields.add("backing file", named(name, info.backing_format.as_deref()));
    }
    for name in &info.files {
        fields.add("data file", named(name, info.data_file_raw.then_some("raw")));
    }
    if let Some(identity) = &info.identity {
        fields.add("identity", identity);
    }
    if let Some(identity) = &info.backing_identity {
        fields.add("backing identity", identity);
    }
    if info.dirty {
        fields.add("state", "not closed cleanly; it is repaired when it is next written");
    }
    if info.corrupt {
        fields.add("state", "marked corrupt");
    }
    fields.print(out, 0);
    print_properties(info, out);
    print_snapshots(&info.snapshots, out);
    print_bitmaps(&info.bitmaps, out)
}

fn named(name: &str, format: Option<&str>) -> String {
    match format {
        Some(format) => format!("{name} ({format})"),
        None => name.to_owned(),
    }
}

fn print_properties(info: &ImageInfo, out: &mut Output) {
    if info.properties.is_empty() {
        return;
    }
    out.line(format!("{} options:", info.format));
    let mut fields = Fields::default();
    for (key, value) in &info.properties {
        fields.add(key, value);
    }
    fields.print(out, 2)
}

fn print_snapshots(snapshots: &[SnapshotInfo], out: &mut Output) {
    if snapshots.is_empty() {
        return;
    }
    out.line("snapshots:");
    super::snapshot::print_list(snapshots, out, 2)
}

fn print_bitmaps(bitmaps: &[BitmapInfo], out: &mut Output) {
    if bitmaps.is_empty() {
        return;
    }
    out.line("bitmaps:");
    let mut table = Table::new(&["name", ">granularity", "state"]);
    for bitmap in bitmaps {
        let state = super::bitmap::state(bitmap);
        table.row([bitmap.name.clone(), bytes_short(bitmap.granularity), state.to_owned()]);
    }
    table.print(out, 2)
}
