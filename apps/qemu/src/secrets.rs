//! `--object`: secrets and credentials that options refer to by id.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vdkit::Secret;

use crate::failure::Failure;
use crate::names::Flat;

/// The objects of one command line.
#[derive(Debug, Default)]
pub struct Objects {
    secrets: BTreeMap<String, Vec<u8>>,
    /// Objects of other kinds, with their properties.
    others: BTreeMap<String, Flat>,
}

impl Objects {
    /// Reads the values of all `--object` options.
    ///
    /// # Errors
    /// An unknown kind, a missing or contradicting property, a file that cannot be read.
    pub fn parse<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self, Failure> {
        let mut objects = Self::default();
        for text in texts {
            let mut properties = match text.starts_with('{') {
                true => Flat::from_json(text).map_err(Failure::new)?,
                false => Flat::from_keys(text, Some("qom-type")).map_err(Failure::new)?,
            };
            let missing = |name: &str| Failure::new(format!("Parameter '{name}' is missing"));
            let kind = properties.take("qom-type").ok_or_else(|| missing("qom-type"))?;
            let id = properties.take("id").ok_or_else(|| missing("id"))?;
            if objects.secrets.contains_key(&id) || objects.others.contains_key(&id) {
                return Err(Failure::new(format!(
                    "attempt to add duplicate property '{id}' to object (type 'container')"
                )));
            }
            match kind.as_str() {
                "secret" => {
                    let bytes = secret(&mut properties)?;
                    objects.secrets.insert(id, bytes);
                }
                "tls-creds-x509" | "tls-creds-psk" | "authz-simple" | "authz-list"
                | "authz-list-file" | "authz-listfile" | "authz-pam" => {
                    properties.put("qom-type", &kind);
                    objects.others.insert(id, properties);
                }
                _ => return Err(Failure::new(format!("Invalid parameter '{kind}'"))),
            }
        }
        Ok(objects)
    }

    /// The secret with this id.
    ///
    /// # Errors
    /// There is none.
    pub fn secret(&self, id: &str) -> Result<Secret, Failure> {
        match self.secrets.get(id) {
            Some(bytes) => Ok(Secret::new(bytes.clone())),
            None => Err(Failure::new(format!("No secret with id '{id}'"))),
        }
    }

    /// Whether there is a secret with this id.
    pub fn has_secret(&self, id: &str) -> bool {
        self.secrets.contains_key(id)
    }

    /// The properties of another object; `qom-type` is its kind.
    pub fn other(&self, id: &str) -> Option<&Flat> {
        self.others.get(id)
    }
}

fn secret(properties: &mut Flat) -> Result<Vec<u8>, Failure> {
    let (data, file) = (properties.take("data"), properties.take("file"));
    let format = properties.take("format");
    if properties.take("keyid").is_some() {
        return Err(Failure::new(
            "secrets that are encrypted with another one (keyid) are not supported",
        ));
    }
    if let Some(key) = properties.first_key() {
        return Err(Failure::new(format!("Invalid parameter '{key}'")));
    }
    let bytes = match (data, file) {
        (Some(_), Some(_)) => {
            return Err(Failure::new("'file' and 'data' are mutually exclusive"));
        }
        (None, None) => return Err(Failure::new("Either 'file' or 'data' must be provided")),
        (Some(data), None) => data.into_bytes(),
        (None, Some(file)) => std::fs::read(&file).map_err(|error| {
            Failure::new(format!(
                "Unable to read {file}: Failed to open file “{file}”: {}",
                crate::failure::system_words(&error)
            ))
        })?,
    };
    match format.as_deref() {
        None | Some("raw") => Ok(bytes),
        Some("base64") => {
            decode_base64(&bytes).ok_or_else(|| Failure::new("Invalid base64 data in secret"))
        }
        Some(other) => {
            Err(Failure::new(format!("Parameter 'format' does not accept value '{other}'")))
        }
    }
}

/// Decodes base64; white space is skipped.
fn decode_base64(text: &[u8]) -> Option<Vec<u8>> {
    let text: Vec<u8> = text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
    STANDARD.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_read_in_each_form() {
        let objects = Objects::parse(
            ["secret,id=a,data=abc", "secret,id=b,data=YWJjZA==,format=base64"].into_iter(),
        )
        .unwrap();
        assert_eq!(objects.secrets["a"], b"abc");
        assert_eq!(objects.secrets["b"], b"abcd");
        for (text, words) in [
            ("secret,id=a", "Either 'file' or 'data' must be provided"),
            ("secret,data=x", "Parameter 'id' is missing"),
            ("thing,id=a", "Invalid parameter 'thing'"),
        ] {
            assert_eq!(Objects::parse([text].into_iter()).unwrap_err().text, words);
        }
    }
}
