//! Words the engine's remedies as this command's own subcommands and options.

use vdkit::{Error, Remedy, Repair};

use crate::failure::{Context, quoted, quoted_word};
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
        Remedy::Force { instead, when } => {
            let instead = worded(instead, error, context).unwrap_or_default();
            format!("{instead}; if {when}, repeat with --force")
        }
        Remedy::ExtractDisks => format!(
            "'vdkit info {file}' lists its disks, 'vdkit convert {file} FOLDER/' takes them out (one of \
             them: --disk N); '-f raw' takes the tar file itself for a disk"
        ),
        remedy => for_references(remedy).unwrap_or_else(|| for_an_image(remedy)),
    };
    (!hint.is_empty()).then_some(hint)
}

/// A remedy about files that an image names; none for others.
fn for_references(remedy: &Remedy) -> Option<String> {
    let hint = match remedy {
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
        Remedy::StandAlone { overlay } => format!(
            "use an overlay of its own instead, or first make them independent ('vdkit rebase {} --no-backing')",
            quoted(overlay)
        ),
        Remedy::NameBackingFormat { format: None } => {
            "name it: '--backing-format FORMAT' (-F FORMAT)".into()
        }
        Remedy::NameBackingFormat { format: Some(format) } => {
            format!("if it is {format}, say so: '--backing-format {format}' (-F {format})")
        }
        _ => return None,
    };
    Some(hint)
}

/// A remedy about one image, its keys or its format.
fn for_an_image(remedy: &Remedy) -> String {
    match remedy {
        Remedy::GiveKey => "give its key with --key-file FILE, --key-fd N or --key-env NAME".into(),
        Remedy::GiveNewKey => {
            "give one: 'vdkit create' takes --key-file FILE, --key-fd N or --key-env NAME, \
                               commands that read another image --target-key-file and so on"
                .into()
        }
        Remedy::GiveOtherKey => {
            "give the key of another slot with --key-file, --key-fd or --key-env".into()
        }
        Remedy::ChangeKey { file, milliseconds } => format!(
            "a new key slot can have it: vdkit key change {} --key-file KEY --new-key-file NEW-KEY --iter-time \
             {milliseconds}",
            quoted(file)
        ),
        Remedy::Convert { file, target, new_key } => {
            let target =
                target.iter().map(|(format, options)| format!(" -O {format} -o {options}"));
            let key = if *new_key { " --target-key-file KEY" } else { "" };
            let target = target.collect::<String>();
            format!("a new image can have it: vdkit convert{target}{key} {} NEW", quoted(file))
        }
        Remedy::Overlay => {
            "write to an overlay instead: vdkit create OVERLAY.qcow2 --backing IMAGE".into()
        }
        Remedy::NameFormat { format } => format!(
            "name the format with '-f {format}' (it is spooled then), or '-f raw' if it is raw"
        ),
        Remedy::Create { bytes } => {
            let bytes = bytes.map_or("SIZE".to_owned(), |bytes| bytes.to_string());
            format!("make an empty one with 'vdkit create FILE {bytes}'")
        }
        Remedy::Resize { file, bytes, shrink } => {
            let file = quoted(file);
            match shrink {
                false => format!("make it larger first: 'vdkit resize {file} {bytes}'"),
                true => format!("'vdkit resize --shrink {file} {bytes}' does that"),
            }
        }
        Remedy::RemoveBitmap { file, name } => {
            let (file, name) = (quoted(file), quoted_word(name));
            format!("remove it first: 'vdkit bitmap remove {file} {name}'")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(remedy: Remedy) -> String {
        let error = Error::invalid("wrong").with_remedy(remedy.clone());
        worded(&remedy, &error, &Context::default()).unwrap()
    }

    /// A name in an image or a folder may be anything.
    #[test]
    fn names_are_words_for_a_shell() {
        let (file, name) = ("a b".to_owned(), "x;reboot".to_owned());
        let bitmap = Remedy::RemoveBitmap { file: file.clone(), name };
        assert!(said(bitmap).contains("'vdkit bitmap remove 'a b' 'x;reboot''"));
        let first = Remedy::forced("they do not matter", Remedy::StandAlone { overlay: file });
        let words = said(*first);
        assert!(words.contains("'vdkit rebase 'a b' --no-backing')"), "{words}");
        assert!(words.ends_with("; if they do not matter, repeat with --force"), "{words}");
    }
}
