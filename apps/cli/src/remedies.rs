//! Words the engine's remedies as this command's own subcommands and options.

use vdkit::{Error, Remedy, Repair};

use crate::failure::{Context, quoted};
use crate::incoming::STANDARD_INPUT;
use crate::protocols::unread;

/// The remedy of `error` in the words of the command line; none if there is nothing to add.
pub(crate) fn worded(remedy: &Remedy, error: &Error, context: &Context<'_>) -> Option<String> {
    let file = match error {
        Error::Corrupt(fault) => quoted(&fault.file),
        Error::Unsupported { file, .. } => quoted(file),
        _ => "IMAGE".to_owned(),
    };
    let hint: String = match remedy {
        Remedy::Check if context.command == "check" => return None,
        Remedy::Check => match (error, context.format) {
            (Error::Corrupt(fault), _)
                if fault.file == STANDARD_INPUT || unread(&fault.file).is_some() =>
            {
                "'vdkit check' lists what is damaged, once it is in a file".into()
            }
            (_, Some(format)) => format!("'vdkit check -f {format} {file}' lists what is damaged"),
            (_, None) => format!("'vdkit check {file}' lists what is damaged"),
        },
        Remedy::CheckAs { format } => format!(
            "'vdkit check -f {format} {file}' says what is wrong with it; if every byte of it belongs to \
             the disk, say so with '-f raw'"
        ),
        Remedy::Repair { repair, force } => {
            let what = if *repair == Repair::Leaks { "leaks" } else { "all" };
            let force = if *force { " --force" } else { "" };
            let lost = "to do without what is lost, run:";
            format!("{lost} vdkit check --repair {what}{force} {file}")
        }
        Remedy::GiveKey => "give its key with --key-file FILE, --key-fd N or --key-env NAME".into(),
        Remedy::GiveNewKey => {
            "give one: 'vdkit create' takes --key-file FILE, --key-fd N or --key-env NAME, \
                               commands that read another image --target-key-file and so on"
                .into()
        }
        Remedy::FollowReferences => "leave out --no-refs".into(),
        Remedy::AllowFolder(folder) => {
            let folder = quoted(&folder.display().to_string());
            format!("if you trust the image, allow it with --allow-ref {folder}")
        }
        Remedy::GiveParent => {
            "the format has no place for a name: give the file with --parent".into()
        }
        Remedy::StoreReference { overlay, backing, format } => {
            let backing = backing.as_deref().map_or("NEW".to_owned(), quoted);
            let format = format.iter().map(|format| format!(" --backing-format {format}"));
            let overlay = quoted(overlay);
            format!(
                "to store the right reference: vdkit rebase --unsafe {overlay} --backing {backing}{}",
                format.collect::<String>()
            )
        }
        Remedy::Convert { file, target, new_key } => {
            let target =
                target.iter().map(|(format, options)| format!(" -O {format} -o {options}"));
            let key = if *new_key { " --target-key-file KEY" } else { "" };
            let target = target.collect::<String>();
            format!("a new image can have it: vdkit convert{target}{key} {} NEW", quoted(file))
        }
        Remedy::ChangeKey { file, milliseconds } => format!(
            "a new key slot can have it: vdkit key change {} --key-file KEY --new-key-file NEW-KEY --iter-time \
             {milliseconds}",
            quoted(file)
        ),
        Remedy::Overlay => {
            "write to an overlay instead: vdkit create OVERLAY.qcow2 --backing IMAGE".into()
        }
        other => other.to_string(),
    };
    (!hint.is_empty()).then_some(hint)
}
