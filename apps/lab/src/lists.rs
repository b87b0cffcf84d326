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
        let groups = grouped([("b", 1), ("a", 2), ("b", 3)]);
        assert_eq!(groups, [("b", vec![1, 3]), ("a", vec![2])]);
        assert_eq!(grouped::<u8, u8>([]), []);
    }
}
