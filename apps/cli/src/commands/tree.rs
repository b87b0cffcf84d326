//! `vdkit tree`: shows which image backs which.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use vdkit::Monitor;
use vdkit::jobs::{self, ReferenceStatus, TreeImage, TreeOptions, TreeReport};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, References};
use crate::failure::{Exit, Outcome, Tone, print_line};
use crate::output::{Output, bytes_short};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "tree",
    about: "Show which image backs which, and what deleting one would break",
    details: "\
For an image: the images of its folder that belong to its chain. For a folder: every image in it. \
Reads only headers; the files that they name are looked up but not opened.",
    examples: "
vdkit tree                             images in this folder
vdkit tree base.qcow2                  the images that depend on it
vdkit tree -r /var/lib/libvirt/images  with subfolders
vdkit tree --delete-check base.qcow2   can it be deleted? 0 yes, 5 an image needs it, 8 not known
",
    ..runs::<TreeArgs>()
};

#[derive(Args, Debug)]
pub struct TreeArgs {
    /// An image or a folder
    #[arg(value_name = "IMAGE|DIR", default_value = ".", hide_default_value = true, value_hint = ValueHint::AnyPath)]
    path: PathBuf,
    /// Only report which images need FILE: exit code 0 if none, 5 if any, 8 if an image beside it
    /// cannot be read
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["path", "recursive"])]
    delete_check: Option<PathBuf>,
    /// Search subfolders too
    #[arg(short = 'r', long)]
    recursive: bool,
    #[command(flatten)]
    references: References,
    #[command(flatten)]
    json: Json,
}

impl Run for TreeArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let mut options = TreeOptions::default();
        options.refs = self.references.policy();
        options.recursive = self.recursive;
        let cancel = session.cancel_on_signal()?;
        let monitor = Monitor::default().cancelled_by(cancel);
        let path = self.delete_check.as_ref().unwrap_or(&self.path);
        let report = jobs::tree(&vdkit::registry(), path, &options, &monitor)?;
        let asked = path.canonicalize().unwrap_or_else(|_| path.clone());
        let needed = report.image(&asked).is_some_and(|image| !image.deleting_orphans.is_empty());
        let exit = match self.delete_check {
            Some(_) if needed => Exit::Refused,
            // A damaged overlay cannot say what it stands on.
            Some(_) if !report.faults.is_empty() => Exit::Unchecked,
            _ => Exit::Done,
        };
        if self.json.json {
            session.out.json(&report);
            return Ok(exit);
        }
        if self.delete_check.is_some() {
            print_orphans(path, report.image(&asked), session);
        } else {
            let parent = asked.parent().filter(|_| !asked.is_dir());
            let folder = parent.unwrap_or(&asked);
            let mut drawing = Drawing {
                images: report.images.iter().map(|image| (image.path.as_path(), image)).collect(),
                folder,
                drawn: HashSet::new(),
            };
            drawing.draw(&report, &mut session.out);
        }
        session.out.flush();
        for fault in &report.faults {
            print_line(Tone::Warning, &fault.error);
        }
        if self.delete_check.is_some() && !report.faults.is_empty() {
            let text =
                "what cannot be read may need it too: 'vdkit check' says what is wrong there";
            print_line(Tone::Hint, text);
        }
        Ok(exit)
    }
}

/// Reports the images that could not be read if a file were deleted.
fn print_orphans(path: &Path, image: Option<&TreeImage>, session: &mut Session) {
    let orphans = image.map_or(&[][..], |image| &image.deleting_orphans);
    if orphans.is_empty() {
        return session
            .out
            .line(format!("{}: no image beside it that can be read needs it", path.display()));
    }
    let named = path.parent().unwrap_or(Path::new(""));
    for orphan in orphans {
        let name = orphan.file_name().map_or(orphan.clone(), |name| named.join(name));
        session.out.line(format!("{}: deleting it orphans {}", path.display(), name.display()));
    }
}

struct Drawing<'a> {
    images: HashMap<&'a Path, &'a TreeImage>,
    folder: &'a Path,
    drawn: HashSet<&'a Path>,
}

/// Deepest nesting that is drawn. The chain limit for opening images is lower.
const DEPTH_MAX: usize = 1000;

impl<'a> Drawing<'a> {
    fn draw(&mut self, report: &'a TreeReport, out: &mut Output) {
        for root in report.roots() {
            if let Some(backing) = &root.backing {
                let why = match backing.standing {
                    ReferenceStatus::Missing => "missing",
                    ReferenceStatus::Refused => "refused by policy",
                    ReferenceStatus::Elsewhere | ReferenceStatus::Listed => "not in this folder",
                };
                out.line(format!("{} ({why})", backing.name));
                self.branch(root, "└─ ", "   ", 0, out);
            } else {
                self.branch(root, "", "", 0, out);
            }
        }
        // A cycle of images has no root.
        for image in &report.images {
            if !self.drawn.contains(image.path.as_path()) {
                out.line(format!("{}  (in a chain without an end)", self.name(image)));
            }
        }
        if report.images.is_empty() {
            out.line("no images");
        }
    }

    fn name(&self, image: &TreeImage) -> String {
        image.path.strip_prefix(self.folder).unwrap_or(&image.path).display().to_string()
    }

    /// Draws an image and its overlays.
    fn branch(
        &mut self,
        image: &'a TreeImage,
        first: &str,
        rest: &str,
        depth: usize,
        out: &mut Output,
    ) {
        if depth > DEPTH_MAX || !self.drawn.insert(&image.path) {
            return;
        }
        let name = self.name(image);
        let mut line =
            format!("{first}{name}  {} {}", image.format, bytes_short(image.virtual_size));
        match image.deleting_orphans.len() {
            0 => {}
            1 => line.push_str("  (deleting it breaks 1 image)"),
            n => line.push_str(&format!("  (deleting it breaks {n} images)")),
        }
        out.line(line);
        let overlays: Vec<&'a TreeImage> = image
            .overlays
            .iter()
            .filter_map(|path| self.images.get(path.as_path()).copied())
            .collect();
        for (i, overlay) in overlays.iter().enumerate() {
            let last = i + 1 == overlays.len();
            let (twig, below) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            let (twig, below) = (format!("{rest}{twig}"), format!("{rest}{below}"));
            self.branch(overlay, &twig, &below, depth + 1, out);
        }
    }
}
