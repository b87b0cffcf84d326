//! `vdkit key`: manages the key slots of encrypted images.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use serde::Serialize;
use vdkit::jobs::{self, KeysAfter};
use vdkit::{KeySlot, Monitor, OpenOptions, Secret};

use super::{Run, Subcommand, runs};
use crate::arguments::Json;
use crate::failure::{Exit, Failure, Outcome};
use crate::keys::{Keys, NewKey};
use crate::output::{Output, Table};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "key",
    about: "List, add, remove or change the keys of an encrypted image",
    details: "\
An image encrypted with LUKS (qcow2 or luks) has eight key slots. Each holds one key that opens \
the image.

  list      show the slots, and which of them the given keys open
  add       add a key (--new-key-file); needs a key that opens the image (--key-file)
  remove    wipe --slot N; needs the key of another slot, unless --force, so that the
            image can still be opened
  change    replace a key; wipes the old key only when the new one is durable and was tested

The data stays as it is. A person with an older copy of the image and a key that was removed later \
can still read that copy.",
    examples: "
vdkit key list disk.qcow2
vdkit key add disk.qcow2 --key-file old.key --new-key-file second.key
vdkit key change disk.qcow2 --key-file old.key --new-key-file new.key
vdkit key remove disk.qcow2 --slot 1 --key-file new.key
",
    ..runs::<KeyArgs>()
};

#[derive(Args, Debug)]
pub struct KeyArgs {
    /// Action: list, add, remove or change
    #[arg(value_name = "ACTION", value_enum, hide_possible_values = true)]
    action: Action,
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Format of the image (default: probed from its header)
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    #[command(flatten)]
    keys: Keys,
    #[command(flatten)]
    new_key: NewKey,
    /// The slot to remove, or the only slot to change
    #[arg(long, value_name = "N")]
    slot: Option<u32>,
    /// Milliseconds that trying the new key takes on this machine (default: 2000)
    #[arg(long, value_name = "MS")]
    iter_time: Option<u64>,
    /// Remove a slot even if no given key opens the image afterwards
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    json: Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Action {
    List,
    Add,
    Remove,
    Change,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct KeyAnswer {
    filename: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    added_slot: Option<u32>,
    removed_slots: Vec<u32>,
    slots: Vec<SlotAnswer>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct SlotAnswer {
    slot: u32,
    active: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    iterations: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    opened: Option<bool>,
}

/// Default unlock time of a new key in milliseconds, as with QEMU and cryptsetup.
const ITER_TIME: u64 = 2000;

impl KeyArgs {
    /// Refuses options that would have no effect.
    fn refuse_idle_options(&self) -> Result<(), Failure> {
        use Action::{Add, Change, Remove};
        let given = [
            ("--new-key-…", self.new_key.key().is_some(), &[Add, Change][..]),
            ("--slot", self.slot.is_some(), &[Remove, Change]),
            ("--iter-time", self.iter_time.is_some(), &[Add, Change]),
            ("--force", self.force, &[Remove]),
        ];
        for (name, given, actions) in given {
            if given && !actions.contains(&self.action) {
                let action = self.action.to_possible_value();
                let action = action.as_ref().map_or("this", |action| action.get_name());
                return Err(Failure::usage(format!("{name} has no meaning with '{action}'")));
            }
        }
        Ok(())
    }

    fn new_key(&self) -> Result<&Secret, Failure> {
        self.new_key.key().ok_or_else(|| {
            Failure::usage("the new key is missing")
                .hint("give it with --new-key-file FILE, --new-key-fd N or --new-key-env NAME")
        })
    }

    fn answer(&self, slots: &[KeySlot], opened: Option<&[u32]>) -> KeyAnswer {
        let slot = |slot: &KeySlot| SlotAnswer {
            slot: slot.number,
            active: slot.active,
            iterations: slot.active.then_some(slot.iterations),
            opened: opened.map(|opened| opened.contains(&slot.number)),
        };
        KeyAnswer {
            filename: self.image.display().to_string(),
            added_slot: None,
            removed_slots: Vec::new(),
            slots: slots.iter().map(slot).collect(),
        }
    }

    fn list(&self, options: &OpenOptions, out: &mut Output) -> Outcome {
        let listed =
            jobs::list_keys(&vdkit::registry(), &self.image, options, &Monitor::default())?;
        let tried = !options.keys.is_empty();
        let answer = self.answer(&listed.slots, tried.then_some(&listed.opened[..]));
        self.json.print(&answer, out, print_slots);
        if tried && listed.opened.is_empty() {
            return Err(Failure::failed(format!(
                "{}: the key opens none of its key slots",
                self.image.display()
            )));
        }
        Ok(Exit::Done)
    }

    fn changed(&self, after: &KeysAfter, out: &mut Output) -> Outcome {
        if self.json.json {
            let answer = KeyAnswer {
                added_slot: after.added,
                removed_slots: after.removed.clone(),
                ..self.answer(&after.slots, None)
            };
            out.json(&answer);
            return Ok(Exit::Done);
        }
        let image = self.image.display();
        if let Some(slot) = after.added {
            out.line(format!("{image}: slot {slot} has the new key"));
        }
        for slot in &after.removed {
            out.line(format!("{image}: slot {slot} is wiped"));
        }
        Ok(Exit::Done)
    }
}

fn print_slots(answer: &KeyAnswer, out: &mut Output) {
    let mut table = Table::new(&[">slot", "state", ">iterations", "key given"]);
    for slot in &answer.slots {
        table.row([
            slot.slot.to_string(),
            if slot.active { "active" } else { "free" }.to_owned(),
            slot.iterations.map_or_else(|| "-".to_owned(), |n| n.to_string()),
            match slot.opened {
                Some(true) => "opens it".to_owned(),
                _ => "-".to_owned(),
            },
        ]);
    }
    table.print(out, 0)
}

impl Run for KeyArgs {
    fn run(self, session: &mut Session) -> Outcome {
        self.refuse_idle_options()?;
        let (registry, image) = (vdkit::registry(), self.image.as_path());
        let options = OpenOptions::read_only().maybe_format(self.format.clone());
        let options = self.keys.apply(options);
        let milliseconds = self.iter_time.unwrap_or(ITER_TIME);
        // A signal ends the process at once, which suits a change of keys at each of its steps.
        let monitor = Monitor::default();
        let after = match self.action {
            Action::List => return self.list(&options, &mut session.out),
            Action::Add => {
                let new = self.new_key()?;
                jobs::add_key(&registry, image, &options, new, None, milliseconds, &monitor)?
            }
            Action::Remove => {
                let slot = self.slot.ok_or_else(|| {
                    Failure::usage("--slot N is missing")
                        .hint("'vdkit key list IMAGE --key-file FILE' shows which slot a key opens")
                })?;
                jobs::remove_key(&registry, image, &options, slot, self.force, &monitor)?
            }
            Action::Change => {
                let new = self.new_key()?;
                let slot = self.slot;
                jobs::change_key(&registry, image, &options, new, slot, milliseconds, &monitor)?
            }
        };
        self.changed(&after, &mut session.out)
    }
}
