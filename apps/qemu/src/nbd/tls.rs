//! `--tls-creds` and `--tls-authz`: credentials of a server and of a client, and which clients may
//! connect.

use std::path::Path;

use vdkit::nbd::{Admission, Tls};
use vdkit::nbd_client::percent;

use crate::failure::{Failure, system_words};
use crate::getopt::Parsed;
use crate::names::Flat;
use crate::output::say;
use crate::secrets::Objects;

/// The pre-shared keys within the folder of a `tls-creds-psk` object.
const KEYS: &str = "keys.psk";

/// The object that `--tls-creds` names, and its folder. `side` is `server` or `client`.
fn credentials<'o>(
    id: &str,
    objects: &'o Objects,
    side: &str,
) -> Result<(&'o Flat, &'o str), Failure> {
    let failed = |why: String| Failure::new(format!("Failed to get TLS creds: {why}"));
    let not_credentials = || failed(format!("Object with id '{id}' is not TLS credentials"));
    if objects.has_secret(id) {
        return Err(not_credentials());
    }
    let found = objects.other(id);
    let found = found.ok_or_else(|| failed(format!("No TLS credentials with id '{id}'")))?;
    if !found.get("qom-type").is_some_and(|kind| kind.starts_with("tls-creds-")) {
        return Err(not_credentials());
    }
    // An object without an endpoint is a client's.
    if (found.get("endpoint") == Some("server")) != (side == "server") {
        return Err(failed(format!("Expected TLS credentials for a {side} endpoint")));
    }
    let folder = found.get("dir");
    Ok((found, folder.ok_or_else(|| Failure::new("Missing 'dir' property value"))?))
}

fn keys(object: &Flat) -> bool {
    object.get("qom-type") == Some("tls-creds-psk")
}

/// TLS of the server, if it is asked for.
///
/// # Errors
/// Objects that do not exist or are of another kind; files that cannot be read.
pub fn server(parsed: &Parsed, objects: &Objects) -> Result<Option<Tls>, Failure> {
    let Some(id) = parsed.last("tls-creds") else {
        return match parsed.has("tls-authz") {
            true => Err(Failure::new("--tls-authz is not permitted without --tls-creds")),
            false => Ok(None),
        };
    };
    let (object, folder) = credentials(id, objects, "server")?;
    let folder = Path::new(folder);
    let tls = match keys(object) {
        true => Tls::from_keys(&folder.join(KEYS)),
        false => {
            let clients = !matches!(object.get("verify-peer"), Some("no" | "off" | "false" | "n"));
            Tls::from_certificates(folder, clients)
        }
    };
    let tls = tls.map_err(|error| Failure::new(system_words(&error)))?;
    let Some(id) = parsed.last("tls-authz") else { return Ok(Some(tls)) };
    let object = objects.other(id);
    let object =
        object.ok_or_else(|| Failure::new(format!("Cannot find QAuthZ object ID {id}")))?;
    let rule = Rule::parse(id, object)?;
    Ok(Some(tls.with_admission(Admission::new(move |subject| {
        let admitted = rule.admits(subject);
        if !admitted {
            say(format_args!(
                "qemu-nbd: option negotiation failed: TLS x509 authz check for {subject} is denied"
            ));
        }
        admitted
    }))))
}

/// What a client's URI says of TLS: the user before the host, and options.
pub fn client(parsed: &Parsed, objects: &Objects) -> Result<Option<(String, String)>, Failure> {
    let Some(id) = parsed.last("tls-creds") else {
        return match parsed.has("tls-hostname") {
            true => Err(Failure::new("--tls-hostname is not permitted without --tls-creds")),
            false => Ok(None),
        };
    };
    client_options(id, parsed.last("tls-hostname"), objects).map(Some)
}

/// What a client's URI says of the credentials with this id: the user before the host, and options.
pub fn client_options(
    id: &str,
    hostname: Option<&str>,
    objects: &Objects,
) -> Result<(String, String), Failure> {
    let (object, folder) = credentials(id, objects, "client")?;
    if keys(object) {
        let user = object.get("username").unwrap_or("qemu");
        let file = Path::new(folder).join(KEYS).display().to_string();
        let options = format!("tls-psk-file={}", percent(&file));
        return Ok((format!("{}@", percent(user)), options));
    }
    let mut options = format!("tls-certificates={}", percent(folder));
    if let Some(name) = hostname {
        options += &format!("&tls-hostname={}", percent(name));
    }
    Ok((String::new(), options))
}

/// A list of rules; the first one that matches decides.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rules {
    /// Whether a client that no rule matches may connect.
    fallback: bool,
    rules: Vec<ListedRule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ListedRule {
    pattern: String,
    glob: bool,
    allow: bool,
}

/// An authorization object.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// This subject alone.
    Subject(String),
    List(Rules),
    /// A list in a file, which is read for each client.
    File(String),
}

impl Rule {
    fn parse(id: &str, object: &Flat) -> Result<Self, Failure> {
        let needed = |key: &str| {
            let value = object.get(key).map(str::to_owned);
            value.ok_or_else(|| Failure::new(format!("Parameter '{key}' is missing")))
        };
        match object.get("qom-type") {
            Some("authz-simple") => needed("identity").map(Self::Subject),
            Some("authz-list") => Rules::parse(object).map(Self::List).map_err(Failure::new),
            Some("authz-list-file" | "authz-listfile") => {
                let file = needed("filename")?;
                // A faulty file is an error of the command, not of each client.
                Rules::read(&file).map_err(Failure::new)?;
                match object.get("refresh") {
                    Some("no" | "off" | "false") => {
                        Rules::read(&file).map(Self::List).map_err(Failure::new)
                    }
                    _ => Ok(Self::File(file)),
                }
            }
            Some("authz-pam") => Err(Failure::new("vdkit does not have the object 'authz-pam'")),
            _ => Err(Failure::new(format!("Object '{id}' is not a QAuthZ subclass"))),
        }
    }

    fn admits(&self, subject: &str) -> bool {
        match self {
            Self::Subject(name) => name == subject,
            Self::List(rules) => rules.admits(subject),
            Self::File(file) => Rules::read(file).is_ok_and(|rules| rules.admits(subject)),
        }
    }
}

impl Rules {
    fn read(file: &str) -> Result<Self, String> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| format!("Unable to read '{file}': {}", system_words(&error)))?;
        Self::parse(&Flat::from_json(&text)?)
    }

    fn parse(object: &Flat) -> Result<Self, String> {
        let word = |key: &str, known: [&str; 2], default: Option<&str>| {
            let value = object.get(key).or(default);
            let value = value.ok_or_else(|| format!("Parameter '{key}' is missing"))?;
            match known.iter().position(|known| *known == value) {
                Some(which) => Ok(which == 1),
                None => Err(format!("Parameter '{key}' does not accept value '{value}'")),
            }
        };
        let policy = ["deny", "allow"];
        let fallback = word("policy", policy, Some("deny"))?;
        let mut rules = Vec::new();
        for number in 0.. {
            let key = |name: &str| format!("rules.{number}.{name}");
            let there =
                ["match", "policy", "format"].iter().any(|name| object.get(&key(name)).is_some());
            if !there {
                break;
            }
            let pattern = object.get(&key("match"));
            let pattern =
                pattern.ok_or_else(|| format!("Parameter '{}' is missing", key("match")))?;
            rules.push(ListedRule {
                pattern: pattern.to_owned(),
                allow: word(&key("policy"), policy, None)?,
                glob: word(&key("format"), ["exact", "glob"], Some("exact"))?,
            });
        }
        Ok(Self { fallback, rules })
    }

    fn admits(&self, subject: &str) -> bool {
        let matching = self.rules.iter().find(|rule| match rule.glob {
            true => glob(rule.pattern.as_bytes(), subject.as_bytes()),
            false => rule.pattern == subject,
        });
        matching.map_or(self.fallback, |rule| rule.allow)
    }
}

/// Whether a text matches a pattern: `*` is any text, `?` one byte.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    // The last star and where its text ends: a mismatch extends that text by one byte.
    let (mut at, mut there, mut star) = (0, 0, None);
    while there < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, there));
                at += 1;
            }
            Some(letter) if *letter == b'?' || *letter == text[there] => {
                at += 1;
                there += 1;
            }
            _ => {
                let Some((starred, end)) = star else { return false };
                star = Some((starred, end + 1));
                (at, there) = (starred + 1, end + 1);
            }
        }
    }
    pattern[at..].iter().all(|letter| *letter == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Result<Rule, String> {
        let objects = Objects::parse([text].into_iter()).unwrap();
        Rule::parse("a", objects.other("a").unwrap()).map_err(|failure| failure.text)
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let list = "authz-list,id=a,policy=allow,rules.0.match=CN=b*,rules.0.policy=deny,\
                    rules.0.format=glob,rules.1.match=CN=*,rules.1.policy=deny";
        let rule = rule(list).unwrap();
        for (subject, admitted) in [("CN=bob", false), ("CN=*", false), ("CN=eve", true)] {
            assert_eq!(rule.admits(subject), admitted, "{subject}");
        }
    }

    #[test]
    fn objects_are_checked_in_qemus_words() {
        let simple = rule("authz-simple,id=a,identity=C=GB,,CN=x").unwrap();
        assert!(simple.admits("C=GB,CN=x") && !simple.admits("CN=x"));
        assert!(!rule("authz-list,id=a").unwrap().admits("CN=x"));
        for (text, words) in [
            ("authz-simple,id=a", "Parameter 'identity' is missing"),
            ("authz-list,id=a,policy=foo", "Parameter 'policy' does not accept value 'foo'"),
            ("authz-list,id=a,rules.0.match=x", "Parameter 'rules.0.policy' is missing"),
            ("tls-creds-x509,id=a", "Object 'a' is not a QAuthZ subclass"),
        ] {
            assert_eq!(rule(text).unwrap_err(), words, "{text}");
        }
    }

    #[test]
    fn patterns_are_matched() {
        for (pattern, text, matches) in [
            ("", "", true),
            ("*", "", true),
            ("a*c*e", "abcde", true),
            ("a*c*e", "abcdef", false),
            ("?b", "ab", true),
            ("?", "", false),
            ("*ab", "aab", true),
        ] {
            assert_eq!(glob(pattern.as_bytes(), text.as_bytes()), matches, "{pattern} {text}");
        }
    }
}
