//! Command-line options as GNU `getopt_long` reads them: grouped short options, attached values,
//! long options by unique prefix, options after operands, and `--`.

use std::ffi::OsString;

/// One option of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opt {
    /// The letter after one dash, if there is one.
    pub short: Option<char>,
    /// The word after two dashes; empty if there is none.
    pub long: &'static str,
    /// Name of its value in the help; `None` if it takes no value.
    pub value: Option<&'static str>,
    /// One line of help; empty for an option that is accepted and not listed.
    pub help: &'static str,
    /// The name by which code refers to it: the long one, or the one that it has elsewhere.
    key: &'static str,
    /// The long name must be given in full.
    whole: bool,
}

/// An option that takes no value.
pub const fn flag(short: char, long: &'static str, help: &'static str) -> Opt {
    Opt { short: Some(short), long, value: None, help, key: long, whole: false }
}

/// An option with a value.
pub const fn valued(
    short: char,
    long: &'static str,
    value: &'static str,
    help: &'static str,
) -> Opt {
    Opt { short: Some(short), long, value: Some(value), help, key: long, whole: false }
}

/// An option that has only a long name.
pub const fn long(long: &'static str, value: Option<&'static str>, help: &'static str) -> Opt {
    Opt { short: None, long, value, help, key: long, whole: false }
}

/// Another long name of the option `key` with a value; the help does not show it.
pub const fn alias(long: &'static str, key: &'static str) -> Opt {
    Opt { short: None, long, value: Some(""), help: "", key, whole: false }
}

impl Opt {
    /// The same option where QEMU gives it no long name.
    pub const fn short_only(self) -> Self {
        Self { long: "", ..self }
    }

    /// The same option where QEMU's help shows the long name and its program does not know it. The
    /// whole name is taken; a beginning means the options that QEMU's program knows.
    pub const fn whole_name_only(self) -> Self {
        Self { whole: true, ..self }
    }

    /// The name by which code refers to the option: a long one, or the letter.
    pub fn name(&self) -> String {
        match self.short {
            Some(letter) if self.key.is_empty() => letter.to_string(),
            _ => self.key.to_owned(),
        }
    }
}

/// The options and operands of one command line, in the order in which they were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    given: Vec<(String, String)>,
    /// What is left: file names, sizes.
    pub operands: Vec<String>,
}

impl Parsed {
    /// Whether an option was given.
    pub fn has(&self, name: &str) -> bool {
        self.given.iter().any(|(given, _)| given == name)
    }

    /// The last value of an option.
    pub fn last(&self, name: &str) -> Option<&str> {
        self.given.iter().rev().find(|(given, _)| given == name).map(|(_, value)| value.as_str())
    }

    /// All values of an option.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        self.given.iter().filter(move |(given, _)| given == name).map(|(_, value)| value.as_str())
    }

    /// All options with their values, as given. An option without a value has an empty one.
    pub fn in_order(&self) -> impl Iterator<Item = (&str, &str)> {
        self.given.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// Parses `args`. With `stop_at_operand`, everything from the first operand on is an operand.
///
/// # Errors
/// The words that GNU libc prints after the program's name; an argument that is not UTF-8. (Names are
/// text here, since QEMU's syntax is found in them; another file would be meant with its bytes replaced.)
pub fn parse(args: &[OsString], options: &[Opt], stop_at_operand: bool) -> Result<Parsed, String> {
    let text = |arg: &OsString| match arg.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(format!(
            "the argument '{}' is not UTF-8: vdkit takes such a file name by its own name only (vdkit \
             convert, info …)",
            arg.display()
        )),
    };
    let args = args.iter().map(text).collect::<Result<Vec<String>, String>>()?;
    let mut parsed = Parsed::default();
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        if arg == "--" {
            break;
        }
        if let Some(word) = arg.strip_prefix("--") {
            let (option, value) = long_option(word, options, &mut rest)?;
            parsed.given.push((option.name(), value));
        } else if let Some(letters) = arg.strip_prefix('-').filter(|letters| !letters.is_empty()) {
            short_options(letters, options, &mut rest, &mut parsed)?;
        } else {
            parsed.operands.push(arg.clone());
            if stop_at_operand {
                break;
            }
        }
    }
    parsed.operands.extend(rest.cloned());
    Ok(parsed)
}

fn long_option<'a>(
    word: &str,
    options: &'a [Opt],
    rest: &mut std::slice::Iter<'_, String>,
) -> Result<(&'a Opt, String), String> {
    let (name, attached) = match word.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (word, None),
    };
    let option = find_long(name, word, options)?;
    match (option.value, attached) {
        (None, Some(_)) => Err(format!("option '--{}' doesn't allow an argument", option.long)),
        (None, None) => Ok((option, String::new())),
        (Some(_), Some(value)) => Ok((option, value.to_owned())),
        (Some(_), None) => match rest.next() {
            Some(value) => Ok((option, value.clone())),
            None => Err(format!("option '--{}' requires an argument", option.long)),
        },
    }
}

/// The option of a name or unique prefix; `word` is the argument without its dashes.
fn find_long<'a>(name: &str, word: &str, options: &'a [Opt]) -> Result<&'a Opt, String> {
    let named = options.iter().filter(|option| !option.long.is_empty());
    if let Some(exact) = named.clone().find(|option| option.long == name) {
        return Ok(exact);
    }
    let close: Vec<_> =
        named.filter(|option| !option.whole && option.long.starts_with(name)).collect();
    match close[..] {
        [] => Err(format!("unrecognized option '--{word}'")),
        [one, ref others @ ..] if others.iter().all(|other| other.key == one.key) => Ok(one),
        [..] => {
            let names: String =
                close.iter().map(|option| format!(" '--{}'", option.long)).collect();
            Err(format!("option '--{word}' is ambiguous; possibilities:{names}"))
        }
    }
}

fn short_options(
    letters: &str,
    options: &[Opt],
    rest: &mut std::slice::Iter<'_, String>,
    parsed: &mut Parsed,
) -> Result<(), String> {
    for (i, letter) in letters.char_indices() {
        let Some(option) = options.iter().find(|option| option.short == Some(letter)) else {
            return Err(format!("invalid option -- '{letter}'"));
        };
        if option.value.is_none() {
            parsed.given.push((option.name(), String::new()));
            continue;
        }
        let value = match (&letters[i + letter.len_utf8()..], rest.as_slice().first()) {
            ("", Some(next)) => {
                rest.next();
                next.clone()
            }
            ("", None) => return Err(format!("option requires an argument -- '{letter}'")),
            (attached, _) => attached.to_owned(),
        };
        parsed.given.push((option.name(), value));
        break;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: &[Opt] = &[
        valued('f', "format", "FMT", ""),
        flag('U', "force-share", ""),
        flag('p', "progress", ""),
        flag('n', "", ""),
        long("output", Some("human|json"), ""),
        valued('t', "target", "NAME", "").whole_name_only(),
        alias("to", "target"),
        alias("towards", "target"),
    ];

    fn run(line: &str) -> Result<Parsed, String> {
        let args: Vec<OsString> = line.split(' ').map(Into::into).collect();
        parse(&args, OPTIONS, false)
    }

    #[test]
    fn every_spelling_of_a_value_is_read() {
        for line in ["-fraw x", "-f raw x", "--format=raw x", "--format raw x", "x --form raw"] {
            let parsed = run(line).unwrap();
            assert_eq!(parsed.last("format"), Some("raw"), "{line}");
            assert_eq!(parsed.operands, ["x"], "{line}");
        }
        let parsed = run("-pnfraw x -- -y").unwrap();
        assert!(parsed.has("progress") && parsed.has("n"));
        assert_eq!(parsed.operands, ["x", "-y"]);
    }

    #[test]
    fn other_names_of_an_option_mean_it() {
        for line in ["-t x", "--target x", "--to x", "--towards=x", "--tow x", "--t x"] {
            assert_eq!(run(line).unwrap().last("target"), Some("x"), "{line}");
        }
        assert_eq!(run("--ta x").unwrap_err(), "unrecognized option '--ta'");
    }

    #[test]
    fn an_argument_that_is_not_text_is_no_other_name() {
        use std::os::unix::ffi::OsStringExt;
        for line in [&b"\xe9.img"[..], b"--format=\xe9", b"-f\xe9"] {
            let args = [OsString::from_vec(line.to_vec())];
            let words = parse(&args, OPTIONS, false).unwrap_err();
            assert!(words.contains("is not UTF-8"), "{words}");
        }
    }

    #[test]
    fn mistakes_are_told_in_the_words_of_the_c_library() {
        for (line, words) in [
            ("-X", "invalid option -- 'X'"),
            ("-f", "option requires an argument -- 'f'"),
            ("--format", "option '--format' requires an argument"),
            ("--fo", "option '--fo' is ambiguous; possibilities: '--format' '--force-share'"),
            ("--progress=3", "option '--progress' doesn't allow an argument"),
            ("--nothing", "unrecognized option '--nothing'"),
        ] {
            assert_eq!(run(line).unwrap_err(), words, "{line}");
        }
    }
}
