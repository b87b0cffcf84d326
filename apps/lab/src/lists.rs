//! Lists in the order in which their entries first appear.

/// Each entry once.
pub(crate) fn distinct<T: PartialEq>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut found: Vec<T> = Vec::new();
    for one in all {
        if !found.contains(&one) {
            found.push(one);
        }
    }
    found
}

/// The number of each entry: that of its first appearance, from 0.
pub(crate) fn numbered<T: PartialEq>(all: impl IntoIterator<Item = T>) -> Vec<usize> {
    let mut known: Vec<T> = Vec::new();
    let mut numbers = Vec::new();
    for one in all {
        let at = known.iter().position(|other| *other == one);
        numbers.push(at.unwrap_or(known.len()));
        if at.is_none() {
            known.push(one);
        }
    }
    numbers
}

/// The values of each key.
pub(crate) fn grouped<K: PartialEq, V>(all: impl IntoIterator<Item = (K, V)>) -> Vec<(K, Vec<V>)> {
    let mut groups: Vec<(K, Vec<V>)> = Vec::new();
    for (key, value) in all {
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, values)) => values.push(value),
            None => groups.push((key, vec![value])),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_stay_in_the_order_of_their_first_appearance() {
        assert_eq!(distinct(["b", "a", "b", "c", "a"]), ["b", "a", "c"]);
        assert_eq!(numbered(["b", "a", "b", "c", "a"]), [0, 1, 0, 2, 1]);
        let groups = grouped([("b", 1), ("a", 2), ("b", 3)]);
        assert_eq!(groups, [("b", vec![1, 3]), ("a", vec![2])]);
        assert_eq!(grouped::<u8, u8>([]), []);
    }
}
